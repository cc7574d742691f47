"""The real step sends what theory says and nothing else: op, mesh axes, count and bytes of every layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from wire_theory import EXPECTED, LLAMA, communication, part, theory, together, totals

from jaxtrain.hlo import collectives as wire
from jaxtrain.planning.hardware import targets

H100 = "h100:2x8"
V5P = "v5p:2x2x1"
NO_COMPILER, NO_TPU = (
    targets.missing_packages(targets.parse(target), LLAMA["step.attention"]) for target in (H100, V5P)
)


def differences(measured: dict, expected: dict) -> list[str]:
    """One line for every (op, axes, part) whose count differs, or whose bytes by more than 2%."""
    out = []
    for key in sorted(measured.keys() | expected.keys()):
        (count, size), (number, theory) = measured.get(key, (0, 0)), expected.get(key, (0, 0.0))
        if count != number or abs(size - theory) > 0.02 * theory:
            out.append(f"{' '.join(key)}: {count} x, {size / 1e6:.3f} MB; theory {number} x, {theory / 1e6:.3f} MB")
    return out


@pytest.mark.sampled(4)
@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("layout", together(EXPECTED))
def test_every_collective_on_16_absent_h100(layout: str):
    rows = communication(layout, H100)
    assert differences(totals(rows), theory(layout, H100)) == []
    for row in rows:
        assert row.spans_axes, row
        assert row.note == "", row
        assert part(row) == "edges" or row.scope, row


# Small enough for the CPU, and float32: this backend would widen bfloat16 to it.
TINY = {
    "model__embed": 64, "model__layers": 2, "model__heads": 8, "model__kv_heads": 4, "model__mlp": 192,
    "model__vocab": 1024, "data__sequence": 64, "precision": "fp32",
}  # fmt: skip


def by_axes(rows: dict) -> dict[str, float]:
    out: dict[str, float] = {}
    for (_, axes, _), (_, size) in rows.items():
        out[axes] = out.get(axes, 0) + size
    return out


def on_cpu(expected: dict) -> dict:
    """Theory for the CPU backend, which never scatters what it reduces, and does not add up the input gradients of
    q, k, v and of gate, up before it sums them over `model`: 8 streams a layer instead of 5."""
    out = {}
    for (op, axes, name), (count, size) in expected.items():
        reduced = size * (2 if op == "reduce-scatter" else 1)
        out[op, axes, name] = count, reduced * (8 / 5 if (axes, name) == ("model", "layers") else 1)
    return out


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp", "tp"])
def test_bytes_of_every_axis_on_simulated_devices(layout: str):
    measured = by_axes(totals(communication(layout, **TINY)))
    assert measured == pytest.approx(by_axes(on_cpu(theory(layout, **TINY))), rel=0.01)


@pytest.mark.skipif(NO_TPU is not None, reason=str(NO_TPU))
def test_bytes_of_fsdp_on_absent_tpus():
    sizes = {**TINY, "model__head_dim": 128, "model__heads": 4, "data__sequence": 256, "precision": "bf16"}
    measured = totals(communication("fsdp", V5P, **sizes))
    expected = theory("fsdp", V5P, **sizes)
    assert by_axes(measured) == pytest.approx(by_axes(expected), rel=0.02)
    for op in ("all-gather", "reduce-scatter"):
        size = measured[op, "fsdp", "layers"][1]
        assert size == pytest.approx(expected[op, "fsdp", "layers"][1], rel=0.02)


@pytest.mark.parametrize("inside", [True, False])
def test_a_real_permute_in_a_branch_is_found(inside: bool):
    mesh = jax.make_mesh((4, 2), ("pipeline", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def shifted(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "model", [(0, 1), (1, 0)])

    def stage(x: jax.Array) -> jax.Array:
        turn = jax.lax.axis_index("pipeline") == 0
        if inside:
            return jax.lax.cond(turn, shifted, lambda x: 2 * x, x)
        return jax.lax.cond(turn, jnp.sin, lambda x: 2 * x, shifted(x))

    mapped = jax.jit(jax.shard_map(stage, mesh=mesh, in_specs=P("pipeline", "model"), out_specs=P("pipeline", "model")))
    text = mapped.lower(jax.ShapeDtypeStruct((4, 6), jnp.float32)).compile().as_text()
    assert len(wire.divergent_permutes(text)) == inside
    (row,) = wire.count_collectives(text, mesh.shape)
    assert (row.op, row.axes, row.bytes, row.note) == (
        "collective-permute",
        ("model",),
        12,
        "at most" if inside else "",
    )


def test_totals_by_axes_and_short_scopes():
    rows = [
        wire.Collective("all-gather", ("fsdp",), True, 64, 2_500_000_000, "bf16", "jit(step)/jvp()/while/body/q"),
        wire.Collective("all-gather", ("fsdp",), True, 2, 500_000_000, "bf16", ""),
        wire.Collective("all-reduce", ("data", "model"), False, 1, 400, "f32", "", "at most"),
    ]
    assert list(wire.totals_by_axes(rows).items()) == [
        (("fsdp", "all-gather"), (66, 3_000_000_000)),
        (("part of data+model", "all-reduce"), (1, 400)),
    ]
    assert wire.shorten_scope(rows[0].scope) == "jvp()/q"
