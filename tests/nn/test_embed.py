"""The embedding's gradient is added up in float32, whatever the compute dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.nn.embed import Embed
from jaxtrain.nn.env import Env
from jaxtrain.precision.policy import POLICIES


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_a_frequent_token_keeps_all_of_its_gradient(precision: str):
    env = Env(policy=POLICIES[precision])
    module = Embed(8, 4, std=0.02, env=env, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    tokens = jnp.full((4, 2048), 3, jnp.int32)

    def total(state):
        return jnp.sum(nnx.merge(graphdef, state)(tokens).astype(jnp.float32))

    gradient = jax.tree.leaves(jax.jit(jax.grad(total))(state))[0]
    # 8192 ones: a bfloat16 sum would stop at 256.
    np.testing.assert_array_equal(np.asarray(gradient[3], np.float32), np.full(4, 8192.0))
    assert not np.any(np.asarray(gradient, np.float32)[[0, 1, 2, 4]])
