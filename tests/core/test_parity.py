"""What layouts share, against one device: microbatches, remat, offload, repeated heads, where the state lives.

That each layout trains alike is tests/core/test_layouts.py.
"""

from __future__ import annotations

import functools

import harness
import jax
import jax.extend
import numpy as np
import pytest
from harness import close_trees
from remat import remat as keys

EVERYTHING = {"data": 2, "fsdp": 2, "model": 2}


def gradients(program, **options):
    return jax.jit(program.gradients, compiler_options=options)(
        program.init()["params"], harness.batch(0), jax.random.key(0)
    ).grads


@functools.cache
def one_device_gradients():
    return gradients(harness.program())


def test_fewer_kv_heads_than_shards_are_repeated():
    """Four shards of heads, one or two key/value heads: stored whole on each, the weights repeated for use."""
    for model in ({"kv_heads": 1}, {"kv_heads": 2, **harness.OTHERS}):
        alone = harness.program(model=model)
        program = harness.program({"data": 2, "model": 4}, model=model)
        assert program.model_def.names["layers"]["attention"]["k"][2] == "kv_shared"
        close_trees(gradients(alone), gradients(program), 1e-5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_stages_beside_fsdp_and_model(zero: int):
    program = harness.program(EVERYTHING, zero=zero)
    close_trees(one_device_gradients(), gradients(program), 1e-5)
    gate = program.state["params"]["layers"]["mlp"]["gate"]
    moments = [leaf for leaf in jax.tree.leaves(program.state["opt_state"]) if leaf.shape == gate.shape]
    for leaf in (gate, *moments):
        assert np.prod(leaf.sharding.shard_shape(leaf.shape)) * 8 == np.prod(leaf.shape)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [None, EVERYTHING], ids=["one", "3d"])
@pytest.mark.parametrize("accumulate", [2, 8])
def test_accumulation_is_weighted_by_tokens(mesh, accumulate: int):
    """Rows carry very different numbers of targets: a mean of microbatch means would be far off."""
    if mesh and accumulate == 8:
        mesh = {"data": 1, "model": 2}  # microbatches of one row
    program = harness.program(mesh, step={"microbatches": accumulate})
    close_trees(one_device_gradients(), gradients(program), 1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_microbatches_in_bfloat16_stay_near_float32(zero: int):
    """||dg|| / ||g|| <= 4 * 1.03^layers * 2^-8: every microbatch's gradients came in bfloat16."""
    program = harness.program({"data": 4, "model": 2}, zero=zero, precision="bf16", step={"microbatches": 2})
    exact, half = (jax.tree.leaves(tree) for tree in (one_device_gradients(), gradients(program)))
    assert all(g.dtype == np.float32 for g in half)
    error = sum(float(np.sum((np.asarray(a) - np.asarray(b)) ** 2)) for a, b in zip(exact, half))
    assert np.sqrt(error / sum(float(np.sum(np.asarray(a) ** 2)) for a in exact)) <= 4 * 1.03**2 * 2**-8


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_microbatches_add_gradients_layer_by_layer(zero: int, precision: str):
    """No scan over layers hands out a stack of gradients, which would be one more copy of the model."""
    changes = {
        "precision": precision,
        "model": {"sliding_window": None, "sliding_window_pattern": 1},
        "step": {"microbatches": 2},
    }
    program = harness.program({"data": 4, "model": 2}, zero=zero, **changes)
    traced = jax.make_jaxpr(program.gradients)(program.state["params"], harness.batch(0), jax.random.key(0))
    gate = program.model_def.params["layers"]["mlp"]["gate"].shape
    scans = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "scan"]
    assert any(gate in [var.aval.shape for var in eqn.invars] for eqn in scans)  # of layers
    assert not any(gate == var.aval.shape for eqn in scans for var in eqn.outvars)


def equations(jaxpr):
    """All equations, those of inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("remat", ["full", "dots", ("attention", "residual")], ids=str)
def test_remat_does_not_change_the_result(remat):
    program = harness.program(EVERYTHING, step=keys(remat))
    close_trees(one_device_gradients(), gradients(program), 1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("unroll", [4, 0])
def test_unrolled_layers_do_not_change_the_result(unroll, remat):
    """0 leaves no loop over the layers, forward or backward; 4 of 8 leave one of two turns."""
    model, step = {"layers": 8}, {"remat": remat, "unroll": unroll}
    expected = gradients(harness.program(model=model))
    close_trees(expected, gradients(harness.program(EVERYTHING, model=model, step=step)), 1e-5)

    def count(**step):
        program = harness.program(model=model, step=step)
        inputs = program.state["params"], harness.batch(0), jax.random.key(0)
        text = jax.jit(program.gradients).lower(*inputs).as_text()
        return text.count("stablehlo.while"), len(text)

    (loops, length), (loops_left, longer) = count(remat=remat), count(**step)
    assert loops - loops_left == (2 if unroll == 0 else 0)
    assert longer > 1.1 * length


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [None, EVERYTHING], ids=["one", "3d"])
@pytest.mark.parametrize("offload", [("v", "residual"), ("v", "input")], ids=",".join)
def test_offloaded_values_come_back_unchanged(mesh, offload):
    """Bit for bit: the host only keeps them."""
    kept = harness.program(mesh, step={"remat": "full", "remat_save": dict.fromkeys(("q", "k", *offload), "device")})
    moved = harness.program(
        mesh, step={"remat": "full", "remat_save": {"q": "device", "k": "device", **dict.fromkeys(offload, "host")}}
    )
    traced = str(jax.make_jaxpr(moved.gradients)(moved.state["params"], harness.batch(0), jax.random.key(0)))
    assert "f32<host>[8,32,32]" in traced  # the stream; the CPU backend itself has no other memory
    # Without them the CPU backend's fusions, and with these the roundings, depend on where a value is kept.
    newer = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}  # later it has no others
    got = [jax.tree.leaves(gradients(each, **newer)) for each in (kept, moved)]
    assert all(np.array_equal(a, b) for a, b in zip(*got, strict=True))


def test_state_lives_in_shards():
    state = harness.program(EVERYTHING).init()
    gate = state["params"]["layers"]["mlp"]["gate"]
    assert gate.sharding.shard_shape(gate.shape) == (2, 16, 32)
    moments = [leaf for leaf in jax.tree.leaves(state["opt_state"]) if leaf.shape == gate.shape]
    assert len(moments) >= 2
    assert all(leaf.sharding.is_equivalent_to(gate.sharding, gate.ndim) for leaf in moments)
