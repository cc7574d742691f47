"""In bfloat16 the layouts give the gradient of one device, to the rounding of sums in another order.

Microbatches, and the stages of ZeRO that differ by them, are in test_parity.py.
"""

from __future__ import annotations

import functools
from pathlib import Path

import harness
import jax
import numpy as np
import pytest
from selection import one_in

from jaxtrain import load
from jaxtrain.core.program import Program, build_program

LAYERS = 4
BOUND = 4 * 1.03**LAYERS * 2**-8  # of the gradient's norm
ADDED = 1.3  # times what bfloat16 alone is off: a layout rounds in other places, not more often
MODEL = {"embed": 32, "layers": LAYERS, "heads": 4, "kv_heads": 2, "mlp": 64, "vocab": 256}
EXPERTS = {"moe": {"num_experts": 8, "top_k": 2, "shared_experts": 1}, "mlp": 16}
MESHES = {
    "ddp": {"data": 8}, "zero1": {"data": 4, "model": 2}, "fsdp": {"fsdp": 8}, "hsdp": {"data": 2, "fsdp": 4},
    "tp": {"data": 2, "model": 4}, "tp_sp": {"data": 2, "model": 4}, "fsdp_tp": {"fsdp": 2, "model": 4},
    "3d": {"data": 2, "fsdp": 2, "model": 2}, "cp_gather": {"fsdp": 4, "context": 2},
    "cp_ring": {"fsdp": 2, "context": 4}, "cp_ulysses": {"fsdp": 2, "context": 2, "model": 2},
    "ep": {"fsdp": 2, "expert": 4}, "ep_tp": {"fsdp": 2, "expert": 2, "model": 2},
    "pp_fsdp": {"pipeline": 2, "fsdp": 2, "model": 2},
}  # fmt: skip
Flat = dict[str, np.ndarray]


def program(layout: str | None, experts: bool, precision: str) -> Program:
    base = {
        "model": MODEL | (EXPERTS if experts else {}), "precision": precision, 
        "data": {"sequence": harness.LENGTH, "global_batch": harness.ROWS},
        "step": {"microbatches": 4 if layout and layout.startswith("pp") else 1},
    }  # fmt: skip
    config = load(None, base=base | ({"layout": layout, "mesh": MESHES[layout]} if layout else {}))
    return build_program(config, 256, jax.devices()[: 8 if layout else 1])


@functools.cache
def params(experts: bool):
    return jax.device_get(program(None, experts, "fp32").init()["params"])


def gradient(layout: str | None, experts: bool, precision: str) -> Flat:
    run = program(layout, experts, precision)
    placed = jax.tree.map(lambda p, s: jax.device_put(p, s.sharding), params(experts), run.state["params"])
    grads = jax.jit(run.gradients)(placed, harness.placed(run, 0), jax.random.key(0)).grads
    return {jax.tree_util.keystr(k): np.asarray(g, np.float64) for k, g in jax.tree_util.tree_leaves_with_path(grads)}


@functools.cache
def one_device(experts: bool, precision: str) -> Flat:
    return gradient(None, experts, precision)


def norm(tree: Flat) -> float:
    return float(np.sqrt(sum(np.sum(g**2) for g in tree.values())))


def off(got: Flat, want: Flat) -> float:
    return norm({path: got[path] - g for path, g in want.items()}) / norm(want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", one_in(2, MESHES))
def test_a_layout_in_bfloat16_is_as_near_as_one_device(layout: str):
    experts = layout.startswith("ep")
    got, half, exact = gradient(layout, experts, "bf16"), one_device(experts, "bf16"), one_device(experts, "fp32")
    assert 2**-10 < off(half, exact) <= BOUND
    assert off(got, half) <= BOUND
    assert off(got, exact) <= ADDED * off(half, exact)
    # A choice between two experts that are nearly even falls otherwise, 2 of 512 here: few tokens, and all of the
    # gradient of the experts, of the router and of its norm.
    routed = ("moe", "mlp_norm") if experts else ()
    plain = [path for path in half if not any(name in path for name in routed)]
    assert max(off({path: got[path]}, {path: half[path]}) for path in plain) <= BOUND


def test_every_shipped_layout_is_here():
    shipped = {path.stem for path in Path(__file__).parents[2].glob("configs/layouts/*.yaml")}
    # With one microbatch the programs of zero1 and fsdp; and one with stages will do.
    assert shipped - MESHES.keys() == {"zero2", "zero3", "pp"}
