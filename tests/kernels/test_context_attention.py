"""Attention across the shards of a sequence against the reference on one device: outputs and every gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxtrain.kernels.attention import RESIDUALS, attention, halo_exchange, xla
from jaxtrain.kernels.attention.context_parallel import choose_method
from jaxtrain.sharding.context_parallel import zigzag
from jaxtrain.sharding.sharder import Sharder

HEAD_DIM, ROWS = 8, 4
QUICK = {"xla_backend_optimization_level": 0}
METHODS = ("gather", "ulysses", "ring")


@dataclass(frozen=True)
class Case:
    context: int
    data: int = 1
    model: int = 1
    heads: tuple[int, int] = (4, 2)
    tokens: int = 32
    is_packed: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "causal": Case(2, is_packed=False),
    "packed": Case(4),
    "short_window": Case(4, options={"window": 3}),
    "window_of_a_chunk_and_one": Case(2, options={"window": 9}),
    "short_window_unpacked": Case(4, is_packed=False, options={"window": 4}),
    "long_window": Case(4, options={"window": 11}),
    "window_by_layer": Case(2, options={"window": np.int32(6)}),
    "gqa_on_eight": Case(8, heads=(8, 2)),
    "mqa_and_tensor_parallel": Case(4, model=2, heads=(8, 1), options={"scale": 0.5}),
    "softcap_on_three_axes": Case(2, 2, 2, options={"softcap": 3.0}),
}


def sharder(case: Case, axes: tuple[str, ...] = ("context",), shape: tuple[int, ...] | None = None) -> Sharder:
    shape = (case.data, *(shape or (case.context,)), case.model)
    grid = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = Mesh(grid, ("data", *axes, "model"), axis_types=(AxisType.Auto,) * len(shape))
    return Sharder(mesh, {"batch": ("data",), "context": axes, "heads": ("model",), "kv_heads": ("model",)})


@cache
def inputs(heads: tuple[int, int], tokens: int, is_packed: bool) -> tuple[np.ndarray, ...]:
    """Returns q, k, v, the output's cotangent, segments and positions.

    Packed: documents across shards, and shards and a row of padding only.
    """
    rng = np.random.default_rng(tokens)
    shapes = [(ROWS, tokens, n, HEAD_DIM) for n in (heads[0], heads[1], heads[1], heads[0])]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    segments = np.ones((ROWS, tokens), np.int32)
    positions = np.tile(np.arange(tokens, dtype=np.int32), (ROWS, 1))
    if is_packed:
        for row, cuts in enumerate([(5, 20), (1, 18), (13, 13), (0, 0)]):
            segments[row, cuts[0] : cuts[1]], segments[row, cuts[1] :] = 2, 0
            positions[row, cuts[0] :] -= cuts[0]
        segments[1, 18:] = 3
        positions[1, 18:] -= 17
    return *arrays, segments, positions


def outputs(q, k, v, g, segments, positions, **options):
    run = lambda q, k, v: attention(q, k, v, segments_BT=segments, positions_BT=positions, **options)  # noqa: E731
    out, pull = jax.vjp(run, q, k, v)
    return out, *pull(g)


def reference(case: Case) -> tuple[np.ndarray, ...]:
    run = jax.jit(partial(outputs, kernel="reference", **case.options), compiler_options=QUICK)
    return tuple(np.asarray(x) for x in run(*inputs(case.heads, case.tokens, case.is_packed)))


@cache
def expected(name: str) -> tuple[np.ndarray, ...]:
    case = CASES[name]
    return reference(case)


def sharded_outputs(
    method: str, case: Case, place: Sharder, dtype: str = "float32", **options
) -> tuple[np.ndarray, ...]:
    """Returns the outputs computed on shards, in natural order."""
    arrays = inputs(case.heads, case.tokens, case.is_packed)
    arrays = [x.astype(dtype) if x.dtype == np.float32 else x for x in arrays]
    order = zigzag(case.tokens, case.context) if method == "ring" else np.arange(case.tokens)
    run = partial(outputs, context_parallel=method, sharder=place, **{**case.options, **options})
    actual = jax.jit(run, compiler_options=QUICK)(*(x[:, order] for x in arrays))
    return tuple(np.asarray(x.astype(np.float32))[:, np.argsort(order)] for x in actual)


def check(actual, wanted, tolerance: float) -> None:
    for name, a, b in zip(("o", "dq", "dk", "dv"), actual, wanted):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), f"{name} is not finite"
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error < tolerance, f"{name} is off by {error:.1e} of its norm"


# Under ulysses masks are those of the local kernels, which have their own tests.
SOME = ("packed", "long_window", "gqa_on_eight", "mqa_and_tensor_parallel", "softcap_on_three_axes")
METHOD_CASES = [(m, name) for m in METHODS for name in CASES if m != "ulysses" or name in SOME]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("method", "name"), METHOD_CASES)
def test_shards_equal_one_device(method: str, name: str, monkeypatch):
    monkeypatch.setattr(halo_exchange, "TILE", 1)  # sends no more than the window
    if name in ("packed", "mqa_and_tensor_parallel"):
        monkeypatch.setattr(xla, "CPU_BLOCK", 3)  # several blocks of queries per chunk, the last one partial
    case = CASES[name]
    actual = sharded_outputs(method, case, sharder(case))
    check(actual, expected(name), 1e-6)
    padding = inputs(case.heads, case.tokens, case.is_packed)[4] == 0
    assert all((x[padding] == 0).all() for x in actual)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_stays_near_float32(method: str):
    actual = sharded_outputs(method, CASES["packed"], sharder(CASES["packed"]), "bfloat16")
    check(actual, expected("packed"), 1e-2)


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_attention_both_ways(method: str):
    case = Case(4, options={"causal": False, "window": 5})
    check(sharded_outputs(method, case, sharder(case)), reference(case), 1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_over_two_mesh_axes(method: str):
    place = sharder(CASES["packed"], ("expert", "context"), (2, 2))
    check(sharded_outputs(method, CASES["packed"], place), expected("packed"), 1e-6)


@pytest.mark.parametrize(("method", "window"), [("ulysses", None), ("ring", 9)])
def test_fast_kernels_run_on_whole_sequences_and_on_halos(method: str, window: int | None):
    case = Case(2, options={"window": window})
    check(sharded_outputs(method, case, sharder(case), kernel="splash"), reference(case), 2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_layers_in_a_scan_rematerialised(method: str):
    """Gradients through three layers; and what remat saves under the kernels' name is not computed again."""
    case = Case(8, heads=(8, 8))
    q, _, _, g, segments, positions = inputs(case.heads, case.tokens, case.is_packed)
    order = zigzag(case.tokens, 8) if method == "ring" else np.arange(case.tokens)

    def layers(policy, segments, positions, **options):
        @partial(jax.checkpoint, policy=policy)
        def layer(x, scale):
            out = attention(x, x * scale, jnp.sin(x), segments_BT=segments, positions_BT=positions, **options)
            return x + out, None

        return lambda x, scales: jax.lax.scan(layer, x, scales)[0]

    def gradients(run, g, x, scales):
        out, pull = jax.vjp(run, x, scales)
        return out, *pull(g)

    scales = np.array([0.5, 1.0, 1.5], np.float32)
    wanted = gradients(layers(None, segments, positions, kernel="reference"), g, q, scales)
    counts, names = [], jax.checkpoint_policies.save_only_these_names(RESIDUALS)
    for policy in (None, names):
        run = layers(policy, segments[:, order], positions[:, order], context_parallel=method, sharder=sharder(case))
        compiled = jax.jit(partial(gradients, run), compiler_options=QUICK).lower(g[:, order], q[:, order], scales)
        compiled = compiled.compile()
        counts.append(compiled.as_text().count(" collective-permute("))
        out, dx, dscales = compiled(g[:, order], q[:, order], scales)
        back = np.argsort(order)
        check((np.asarray(out)[:, back], np.asarray(dx)[:, back], dscales), wanted, 1e-5)
    # Keys and values: two hops before the loop, one in it. The same in the backward pass (a forward pass that runs
    # again shares the first two), where their gradients hop in the loop, after it and home.
    assert counts == ([6 + 2 + 12, 6 + 12] if method == "ring" else [0, 0])


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_long_sequences_need_no_quadratic_memory(method: str):
    """Neither for scores nor for masks, although JAX moves values that all layers share out of the loop over layers."""
    place, tokens, heads = sharder(Case(2)), 8192, 4
    x = jax.ShapeDtypeStruct((1, tokens, heads, 16), jnp.float32)
    rows = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def loss(x, scales, rows):
        @jax.checkpoint
        def layer(x, scale):
            options = {"segments_BT": rows, "positions_BT": rows, "context_parallel": method, "sharder": place}
            return attention(x * scale, x, x, **options), None

        return jax.lax.scan(layer, x, scales)[0].sum()

    scales = jax.ShapeDtypeStruct((2,), jnp.float32)
    compiled = jax.jit(jax.grad(loss), compiler_options=QUICK).lower(x, scales, rows).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < heads * (tokens // 4) ** 2 * 4


def test_zigzag_pairs_an_early_chunk_with_a_late_one():
    assert zigzag(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    order = zigzag(48, 4).reshape(4, 2, 6)
    assert (np.sort(order.reshape(-1)) == np.arange(48)).all()
    assert (order.sum((1, 2)) == order.sum() / 4).all()  # as many early tokens as late ones
    assert (np.diff(order, axis=2) == 1).all()
    with pytest.raises(ValueError, match="12 tokens do not split into 8 chunks"):
        zigzag(12, 4)


def test_auto_is_ulysses_if_heads_divide():
    assert [choose_method("auto", heads, 4) for heads in (4, 8, 6, 1)] == ["ulysses", "ulysses", "gather", "gather"]
    assert choose_method("ring", 1, 4) == "ring"


@pytest.mark.parametrize(
    ("context", "options", "message"),
    [
        ("rings", {}, "no context parallel method `rings`; expected auto, gather, ulysses, ring"),
        ("ulysses", {"heads": 2}, "ulysses cannot split 2 heads over 4 shards; ring and gather can"),
        ("ring", {"causal": False}, "ring supports only causal attention; expected gather or ulysses"),
        ("ring", {"positions_BT": None}, "ring needs positions_BT"),
        ("ring", {"kernel": "splash"}, "`splash` does not support sequence shards of ring; expected auto or xla"),
        ("gather", {"kernel": "reference"}, "`reference` does not support sequence shards of gather"),
        ("ring", {"tokens": 12}, "12 tokens do not divide over 4 shards under ring"),
    ],
)
def test_refusals_are_one_line(context: str, options: dict, message: str):
    options = dict(options)
    tokens, heads = options.pop("tokens", 16), options.pop("heads", 4)
    q = jnp.zeros((ROWS, tokens, heads, HEAD_DIM))
    rows = {"segments_BT": jnp.ones((ROWS, tokens), jnp.int32), "positions_BT": jnp.zeros((ROWS, tokens), jnp.int32)}
    with pytest.raises(ValueError, match=message) as error:
        attention(q, q, q, context_parallel=context, sharder=sharder(Case(4)), **(rows | options))
    assert "\n" not in str(error.value)
