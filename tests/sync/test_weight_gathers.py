"""Weights of layers that are gathered in 8 bits, and from copies within a node: rounding, bytes, exactness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net

from jaxtrain.core.program import Program
from jaxtrain.errors import UserError
from jaxtrain.hlo.collectives import Collective, count_collectives
from jaxtrain.sharding import weight_gather
from jaxtrain.sharding.quantized_blocks import pack, unpack
from jaxtrain.sharding.rules import EMBED

MODEL = {"embed": 64, "layers": 2, "mlp": 128, "sliding_window": None, "sliding_window_pattern": 1}
LAYOUTS: dict[str, dict[str, int]] = {"fsdp": {"fsdp": 8}, "fsdp_tp": {"fsdp": 4, "model": 2}}
INT8, NODES, BOTH = {"weights": "int8"}, {"secondary": 2}, {"weights": "int8", "secondary": 2}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def program(layout: str, compress: dict[str, Any], **changes: Any) -> Program:
    return harness.program(LAYOUTS[layout], model=MODEL, sync={"compress": compress}, **changes)


def history(layout: str, compress: dict[str, Any], **changes: Any) -> tuple[Any, np.ndarray]:
    state, metrics = harness.run(program(layout, compress, **changes), 4)
    return jax.device_get(state["params"]), metrics["loss"]


@pytest.mark.parametrize("block", [16, 128])
def test_rounding_is_within_half_a_gap(block: int) -> None:
    x = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    x[2] = 0
    blocks = x.reshape(6, -1, block)
    packed = pack(jnp.asarray(blocks), weight_gather.BITS)
    assert packed.shape == (6, 256 // block, block + 4)
    assert packed.dtype == jnp.uint8
    back = np.asarray(unpack(packed, weight_gather.BITS))
    gap = np.abs(blocks).max(-1, keepdims=True) / 127
    assert np.all(np.abs(back - blocks) <= gap / 2 * (1 + 1e-5))
    assert np.abs(back - blocks).max() > 0
    np.testing.assert_array_equal(back[2], 0)


@layouts
@pytest.mark.parametrize("names", [(EMBED, "mlp"), ("mlp", EMBED)])
@pytest.mark.parametrize("compress", [INT8, NODES, BOTH], ids=["int8", "nodes", "both"])
def test_a_weight_arrives_and_its_gradient_passes_straight_through(
    names: tuple[str, str], layout: str, compress: dict[str, Any]
) -> None:
    sharder = program(layout, compress).sharder
    w = jax.device_put(np.random.default_rng(1).normal(size=(128, 256)).astype(np.float32), sharder.sharding(names))

    def use(w: jax.Array) -> jax.Array:
        return sharder.gather_weight(w, names, jnp.float32, of_layer=True)

    found = jax.jit(use)(w)
    used = sharder.sharding(tuple("mlp" if name == "mlp" else None for name in names))
    assert found.sharding.is_equivalent_to(used, 2)
    largest = np.abs(w).max()
    assert np.abs(found - w).max() <= (largest / 254 if "weights" in compress else 0)
    factor = jnp.arange(256.0)
    grad = jax.jit(jax.grad(lambda w: (use(w) * factor).sum()))(w)
    np.testing.assert_array_equal(grad, np.broadcast_to(factor, w.shape))
    assert grad.sharding.is_equivalent_to(w.sharding, 2)


@layouts
def test_copies_within_a_node_change_no_number_and_rounding_little(layout: str) -> None:
    """The state has the weights in full; a loss in 8 bits is near, and copies of what was rounded change nothing."""
    params, plain = history(layout, {})
    for remat in ("none", "full") if layout == "fsdp" else ("none",):
        found, losses = history(layout, NODES, step={"remat": remat})
        np.testing.assert_allclose(losses, plain, rtol=1e-6)
        harness.close_trees(params, found, 1e-5)
    rounded, losses = history(layout, INT8)
    np.testing.assert_allclose(losses, plain, rtol=2e-3)
    assert np.abs(losses - plain).max() > 0
    harness.close_trees(params, rounded, 0.05)
    found, again = history(layout, BOTH)
    np.testing.assert_allclose(again, losses, rtol=1e-6)
    harness.close_trees(rounded, found, 1e-5)


def gathers(layout: str, compress: dict[str, Any]) -> list[Collective]:
    """Those of the weights of layers in the compiled step."""
    one = program(layout, compress)
    step: Any = one.step
    text = step.lower(one.state, harness.placed(one, 0)).compile().as_text()
    rows = count_collectives(text, dict(one.sharder.mesh.shape))
    return [row for row in rows if row.op == "all-gather" and "fsdp" in row.axes and "/while/" in row.scope]


def formula(layout: str, value: float, scale: float) -> tuple[float, float, float]:
    """Bytes that a device sends to gather all weights once: in one stage, between nodes, and within them.

    Each matrix has `embed` first, which is in shards, and blocks of its last dim with `scale` bytes each.
    """
    shards, tensor = LAYOUTS[layout]["fsdp"], LAYOUTS[layout].get("model", 1)
    heads, width, mlp = [4, 2, 2, 4], 16, 128  # q, k, v, o; gate, up, down
    own = sum(64 * each * width / tensor * (value + scale / width) for each in heads)
    own += 3 * 64 * mlp / tensor * (value + scale / (mlp / tensor))
    own *= MODEL["layers"] / shards
    return own * (shards - 1), own * (shards // 2 - 1), own * shards / 2


@pytest.mark.sampled(2)
@layouts
def test_the_program_gathers_the_bytes_of_the_formula(layout: str) -> None:
    plain, int8 = formula(layout, 4, 0), formula(layout, 1, 4)
    assert sum(row.bytes for row in gathers(layout, {})) == pytest.approx(2 * plain[0], rel=1e-6)
    assert sum(row.bytes for row in gathers(layout, INT8)) == pytest.approx(2 * int8[0], rel=1e-6)
    for compress, (_, between, within) in ((NODES, plain), (BOTH, int8)):
        rows = gathers(layout, compress)
        back = [row for row in rows if "transpose(" in row.scope]
        assert sum(row.bytes for row in back) == pytest.approx(within, rel=1e-6)
        assert sum(row.bytes for row in rows) == pytest.approx(between + 2 * within, rel=1e-6)
        assert not any(row.spans_axes for row in rows)
        assert {row.dtype for row in rows} == {"u8" if compress is BOTH else "f32"}


def test_a_model_without_stacked_layers_is_refused_in_one_line() -> None:
    for compress in (INT8, NODES):
        with pytest.raises(UserError, match="needs stacked layers with the methods embed_inputs, run_layers and") as e:
            tiny_net.program({"fsdp": 4}, sync={"compress": compress})
        assert len(str(e.value).splitlines()) == 1
        assert "tiny_net:Net has none" in str(e.value)


def test_bad_input_is_refused_in_one_line(problems: Callable[..., str]) -> None:
    with pytest.raises(
        UserError, match=r"secondary: 3 devices of a node do not divide mesh\.fsdp 8; expected a divisor"
    ):
        program("fsdp", {"secondary": 3})
    moe = {"type": "decoder", "moe": {"num_experts": 4}}
    text = "sync.compress.weights: weights of experts are not gathered as those of other layers; expected the default"
    assert text in problems(sync={"compress": INT8}, model=moe)
