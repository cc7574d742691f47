"""Selection biases of experts have their own update with every optimizer and do not affect other parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config.schema import OptimizerConfig, ScheduleConfig
from jaxtrain.optim.optimizers import clip_by_global_norm, make_optimizer
from jaxtrain.optim.param_dims import is_names
from jaxtrain.optim.schedules import make_schedule
from jaxtrain.optim.selection_bias import without_biases
from jaxtrain.optim.state_sharding import state_names

L, E, D, F = 2, 4, 128, 128
NAMES = {
    "head": ("embed", "vocab"),
    "layers": {
        "bias": ("layers", "balance"),
        "moe": {"up": ("layers", "expert", "embed", "mlp"), "a_bias": ("layers", "balance")},
        "scale": ("layers", None),
    },
}
SHAPES = {"head": (D, 96), "layers": {"bias": (L, E), "moe": {"up": (L, E, D, F), "a_bias": (L, E)}, "scale": (L, D)}}
IS_BIAS = jax.tree.map(lambda n: "balance" in n, NAMES, is_leaf=lambda x: isinstance(x, tuple))
RATE = 1e-3


def draw(seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.integers(-3, 4, s), jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd", "muon"])
def test_biases_step_by_the_sign_and_other_parameters_are_unaffected(name: str):
    cfg = OptimizerConfig(name=name, lr=0.01, weight_decay=0.3, decay_all_parameters=True)
    params, names = draw(0), without_biases(NAMES, IS_BIAS)
    rate = make_schedule(0.01, ScheduleConfig(), 100)
    tx = make_optimizer(cfg, rate, NAMES, params, RATE)
    rest = make_optimizer(cfg, rate, names, without_biases(params, IS_BIAS))
    state, rest_state = tx.init(params), rest.init(without_biases(params, IS_BIAS))
    for step in range(3):
        grads = draw(1 + step)
        updates, state = jax.jit(tx.update)(grads, state, params)
        others, rest_state = jax.jit(rest.update)(
            without_biases(grads, IS_BIAS), rest_state, without_biases(params, IS_BIAS)
        )
        jax.tree.map(np.testing.assert_array_equal, without_biases(updates, IS_BIAS), others)
        for bias, gradient in ((updates["layers"]["bias"], grads["layers"]["bias"]),
                               (updates["layers"]["moe"]["a_bias"], grads["layers"]["moe"]["a_bias"])):  # fmt: skip
            np.testing.assert_array_equal(bias, -np.float32(RATE) * np.sign(gradient))
        params = optax.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, state, rest_state)
    placed = state_names(tx, params, NAMES)
    moments = jax.tree.leaves(placed, is_leaf=is_names)
    assert any("expert" in n for n in moments)
    assert not any("balance" in n for n in moments)


def test_clipping_leaves_biases_out_of_the_norm_but_keeps_their_sign():
    grads = draw(5)
    counted = jax.tree.leaves(without_biases(grads, IS_BIAS))
    clipped, norm = clip_by_global_norm(grads, 0.5, NAMES)
    np.testing.assert_allclose(norm, np.sqrt(sum(float((g**2).sum()) for g in counted)), rtol=1e-6)
    kept = without_biases(clipped, IS_BIAS)
    np.testing.assert_allclose(np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(kept))), 0.5, rtol=1e-5)
    np.testing.assert_array_equal(np.sign(clipped["layers"]["bias"]), np.sign(grads["layers"]["bias"]))
