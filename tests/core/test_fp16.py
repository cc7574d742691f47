"""float16 with a dynamic loss scale: near float32, skips what overflows, comes back, is saved."""

from __future__ import annotations

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import close_trees

from jaxtrain.precision.loss_scaling import GROWTH_INTERVAL, INITIAL_SCALE, MAX_SCALE, MIN_SCALE, update_loss_scale

MESH = {"data": 2, "fsdp": 2, "model": 2}


def test_gradients_stay_near_float32():
    """||dg|| / ||g|| as for bfloat16, with the 2^-11 of float16."""

    def gradients(precision, scale):
        program = harness.program(MESH, precision=precision)
        grads = jax.jit(program.gradients)(program.init()["params"], harness.batch(0), jax.random.key(0), scale)[0]
        return [np.asarray(g, np.float64) / float(scale) for g in jax.tree.leaves(grads)]

    exact, half = gradients("fp32", jnp.float32(1)), gradients("fp16", jnp.float32(INITIAL_SCALE))
    error = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(exact, half)))
    assert error / np.sqrt(sum(np.sum(a**2) for a in exact)) <= 4 * 1.03**2 * 2**-11


def test_the_scale_does_not_change_the_step():
    """By gradient descent, because Adam's step hardly depends on the scale of its gradients."""
    program = harness.program(MESH, precision="fp16", optimizer={"name": "sgd", "lr": 1.0, "grad_clip_norm": None})
    before, (state, metrics) = program.init()["params"], program.step(program.init(), harness.batch(0))
    other = program.init()
    other["scaling"]["scale"] = other["scaling"]["scale"] / 8
    other, low = program.step(other, harness.batch(0))
    assert (float(metrics["loss_scale"]), float(low["loss_scale"])) == (INITIAL_SCALE, INITIAL_SCALE / 8)
    step, again = (jax.tree.map(np.subtract, x["params"], before) for x in (state, other))
    close_trees(step, again, 1e-3)
    np.testing.assert_allclose(low["grad_norm"], metrics["grad_norm"], rtol=1e-3)


def test_an_overflow_skips_the_step_and_lowers_the_scale():
    program = harness.program(MESH, precision="fp16", optimizer={"ema_decay": 0.9})
    state = program.init()
    state["scaling"]["scale"] = jax.device_put(jnp.float32(2.0**40), state["scaling"]["scale"].sharding)
    before = jax.tree.map(np.asarray, state)
    state, metrics = program.step(state, harness.batch(0))
    assert float(metrics["skipped"]) == 1
    assert float(metrics["grad_norm"]) == 0
    assert np.isfinite(float(metrics["loss"]))
    assert int(state["step"]) == 1
    assert float(state["scaling"]["scale"]) == 2.0**39
    for name in ("params", "opt_state", "ema"):
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before[name], state[name]))))
    while float(metrics["skipped"]):
        state, metrics = program.step(state, harness.batch(0))
    assert float(metrics["grad_norm"]) > 0
    assert not np.array_equal(before["params"]["head"], state["params"]["head"])


def test_the_scale_by_hand():
    scaling = {"scale": jnp.float32(4), "good": jnp.int32(GROWTH_INTERVAL - 1)}
    grown = update_loss_scale(scaling, jnp.bool_(True))
    assert (float(grown["scale"]), int(grown["good"])) == (8, 0)
    halved = update_loss_scale(scaling, jnp.bool_(False))
    assert (float(halved["scale"]), int(halved["good"])) == (2, 0)
    patient = update_loss_scale({**scaling, "good": jnp.int32(0)}, jnp.bool_(True))
    assert (float(patient["scale"]), int(patient["good"])) == (4, 1)
    assert (
        float(update_loss_scale({**scaling, "scale": jnp.float32(MIN_SCALE)}, jnp.bool_(False))["scale"]) == MIN_SCALE
    )
    assert float(update_loss_scale({**scaling, "scale": jnp.float32(MAX_SCALE)}, jnp.bool_(True))["scale"]) == MAX_SCALE
