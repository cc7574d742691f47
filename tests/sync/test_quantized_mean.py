"""Means that travel in few bits: rounding within half a gap, nothing lost with residuals, bytes of the program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_net import LAYOUTS, replicas, run

from jaxtrain.hlo.collectives import count_collectives
from jaxtrain.sharding import quantized_blocks
from jaxtrain.sync import quantized_mean as q

SHAPES = {"matrix": (24, 100), "stack": (3, 20, 130), "vector": (1030,), "small": (7, 9)}
RNG = np.random.default_rng(0)
SEEDED = RNG.bit_generator.state
bits = pytest.mark.parametrize("bits", [8, 4, 2, q.FP8])


@pytest.fixture(autouse=True)
def same_values() -> None:
    """Draws of a test do not depend on which tests ran before it in the same process."""
    RNG.bit_generator.state = SEEDED


def width(bits: q.Bits) -> int:
    return bits if isinstance(bits, int) else 8


def mesh_of(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: 2 * count]).reshape(count, 2), ("replica", "fsdp"))


def values(count: int) -> dict[str, np.ndarray]:
    return {name: RNG.normal(size=(count, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def placed(mesh: Mesh, x: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jax.device_put(v, NamedSharding(mesh, PartitionSpec("replica"))) for name, v in x.items()}


@bits
def test_rounding_is_within_half_a_gap_and_codes_fill_their_bytes(bits: q.Bits) -> None:
    x = RNG.normal(size=(65, 128)).astype(np.float32)
    x[3] = 0
    codes, scale = quantized_blocks.encode(jnp.asarray(x), bits)
    assert codes.dtype == jnp.uint8
    assert codes.shape == (65, 128 * width(bits) // 8)
    back, gap = np.asarray(quantized_blocks.decode(codes, scale, bits)), np.abs(scale)[:, None]
    if bits == q.FP8:  # 3 bits of mantissa, and an exponent from -6 on
        gap = gap * 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(x / np.where(gap, gap, 1)), 1e-9))), -6) - 3)
    beyond = np.maximum(np.abs(x) - 1.5 * gap, 0) if bits == 2 else 0  # of the largest code
    assert np.all(np.abs(back - x) <= np.maximum(gap / 2, beyond) * (1 + 1e-5))
    assert np.abs(back - x).max() > 0
    np.testing.assert_array_equal(back[3], 0)
    if width(bits) < 8:  # all codes of many values are used
        used = np.unique(np.round(back[4:] / gap[4:], 3))
        np.testing.assert_allclose(used, np.arange(-quantized_blocks.HIGHEST[bits], quantized_blocks.HIGHEST[bits] + 1))


@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "sparse", "tiny", "large", "one"])
def test_two_bits_lose_little_more_than_the_best_scale_does(kind: str) -> None:
    """Against a search over scales in NumPy; and never more than the values, so that residuals stay small."""
    x = {
        "normal": RNG.normal(size=(500, 128)), "laplace": RNG.laplace(size=(500, 128)),
        "student": RNG.standard_t(3, size=(500, 128)),
        "sparse": RNG.normal(size=(500, 128)) * (RNG.random((500, 128)) < 0.05),
        "tiny": RNG.normal(size=(500, 128)) * 1e-30, "large": RNG.normal(size=(500, 128)) * 1e30,
        "one": np.eye(128),
    }[kind].astype(np.float32)  # fmt: skip
    back = quantized_blocks.unpack(quantized_blocks.pack(jnp.asarray(x), 2), 2)
    exact, back = x.astype(np.float64), np.asarray(back, np.float64)
    largest, best = np.abs(exact).max(-1, keepdims=True), np.full(len(x), np.inf)
    for share in np.geomspace(0.01, 1, 300):
        scale = np.where(largest > 0, largest, 1) * share
        for codes in (np.clip(np.floor(exact / scale) + 0.5, -1.5, 1.5), np.clip(np.round(exact / scale), -1, 1)):
            best = np.minimum(best, ((exact - codes * scale) ** 2).sum(-1))
    lost, square = ((exact - back) ** 2).sum(-1), (exact**2).sum(-1)
    assert np.all(lost <= square * (1 + 1e-6))
    assert lost.sum() <= 1.02 * best.sum()
    if kind == "normal":
        assert lost.sum() < 0.12 * square.sum()
    if kind == "one":
        np.testing.assert_array_equal(back, exact)


def test_two_bits_leave_no_residual_for_long() -> None:
    """What normal values leave is mostly that of the largest of them; it is sent in a few exchanges."""
    left = jnp.asarray(RNG.normal(size=(200, 128)), jnp.float32)
    sent = jax.jit(lambda x: quantized_blocks.unpack(quantized_blocks.pack(x, 2), 2))
    for _ in range(10):
        left = left - sent(left)
    assert float(jnp.sqrt(jnp.mean(left**2))) < 1e-3


@pytest.mark.parametrize("shape", SHAPES.values())
def test_blocks_are_of_one_layer_and_come_back(shape: tuple[int, ...]) -> None:
    x = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    np.testing.assert_array_equal(q.from_blocks(q.to_blocks(x, 4, 8), shape, 8), x)
    if len(shape) == 3:
        layers = np.ones(shape, np.float32) * np.arange(1, shape[0] + 1)[:, None, None]
        blocks = np.asarray(q.to_blocks(jnp.asarray(layers), 4, 8))
        assert all(len(set(block) - {0.0}) <= 1 for block in blocks.reshape(-1, blocks.shape[-1]))


@pytest.mark.sampled(4)
@bits
@pytest.mark.parametrize("count", [2, 4])
def test_nothing_is_lost_with_residuals(bits: q.Bits, count: int) -> None:
    """Applied means + mean of the workers' residuals + the servers' = the sum of the true means, at any time."""
    mesh = mesh_of(count)
    residuals = q.initial_residuals({name: jnp.zeros(shape) for name, shape in SHAPES.items()}, count, bits)
    step = jax.jit(lambda x, r: q.quantized_mean(x, r, bits, mesh))
    applied, true = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for time in range(1, 7):
        x = values(count)
        mean, residuals = step(placed(mesh, x), residuals)
        for name, shape in SHAPES.items():
            applied[name] += np.asarray(mean[name], np.float64)
            true[name] += x[name].astype(np.float64).mean(0)
            left = np.asarray(residuals.worker[name], np.float64).mean(0)
            if name != "small":
                left += np.asarray(q.from_blocks(residuals.server[name], shape, bits), np.float64)
            np.testing.assert_allclose(applied[name] + left, true[name], atol=1e-6 * time)
    off = np.abs(applied["matrix"] - true["matrix"]).max()
    assert {8: 1e-3, q.FP8: 1e-3, 4: 1e-2, 2: 0.1}[bits] < off < {8: 0.1, q.FP8: 0.5, 4: 1.0, 2: 6.0}[bits]


def test_without_residuals_what_is_lost_stays_lost() -> None:
    mesh = mesh_of(2)
    x = {"matrix": np.full((2, 24, 100), 0.05, np.float32)}
    x["matrix"][:, :, 0] = 1.0  # in 4 bits a code is 1/7: 0.05 is rounded to 0
    sums = []
    for residuals in (None, q.initial_residuals({"matrix": jnp.zeros((24, 100))}, 2, 2)):
        step, total, left = jax.jit(lambda x, r: q.quantized_mean(x, r, 4, mesh)), 0.0, residuals
        for _ in range(20):
            mean, left = step(placed(mesh, x), left)
            total += float(mean["matrix"][0, 1])
        sums.append(total)
    assert sums[0] == 0.0
    assert sums[1] == pytest.approx(1.0, abs=0.15)


@bits
def test_the_program_sends_the_bytes_of_the_formula(bits: q.Bits) -> None:
    mesh = mesh_of(4)
    x = placed(mesh, values(4))
    compiled = jax.jit(lambda x: q.quantized_mean(x, None, bits, mesh)[0]).lower(x).compile()
    found = [c for c in count_collectives(compiled.as_text(), mesh.shape) if "replica" in c.axes]
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    assert 2 * sum(c.bytes for c in found) == pytest.approx(q.sent_bytes(shapes, bits, 4, inner=2), abs=16)
    assert {c.op for c in found} == {"all-to-all", "all-gather", "all-reduce"}
    whole = 2 * 4 * sum(int(np.prod(shape)) for shape in SHAPES.values()) * 3 / 4
    assert q.sent_bytes(shapes, bits, 4) < whole * (width(bits) + 3) / 32


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("deltas", "near"), [("int8", 0.01), ("fp8", 0.02), ("int4", 0.05), ("int2", 0.2)])
def test_diloco_in_few_bits_trains_and_keeps_replicas_equal(
    layout: str, deltas: str, near: float, monkeypatch: Any
) -> None:
    monkeypatch.setattr(q, "SMALLEST", 1)  # all of this small network
    sync = {"strategy": "diloco", "every": 2, "outer": {"lr": 0.7, "momentum": 0.9}}
    (_, exact), (state, packed) = (
        run(replicas(2, layout, sync=sync | {"compress": compress}), 12) for compress in ({}, {"deltas": deltas})
    )
    for leaf in jax.tree.leaves(packed[-1]["params"]):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    assert packed[-1]["metrics"]["loss"] == pytest.approx(exact[-1]["metrics"]["loss"], rel=near)
    assert packed[1]["metrics"]["exchanged_bytes"] < exact[1]["metrics"]["exchanged_bytes"]
    assert packed[1]["metrics"]["consensus_distance"] > 0
    assert jnp.abs(state["sync"]["own"]["worker"]["a"]).max() > 0


def test_a_replica_that_is_not_finite_is_left_out_of_a_compressed_exchange(monkeypatch: Any) -> None:
    monkeypatch.setattr(q, "SMALLEST", 1)
    program = replicas(2, "fsdp", sync={"strategy": "diloco", "every": 2, "compress": {"deltas": "int8"}})
    state, _ = run(program, 1)
    state["params"]["a"] = state["params"]["a"].at[1].set(jnp.nan)
    after, metrics = jax.jit(program.synchronizer.exchange)(state)
    assert np.asarray(metrics["left_out"]).tolist() == [0.0, 1.0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after["params"], after["sync"])))
