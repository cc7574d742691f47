"""The embedding's gradient is added up in float32, whatever the compute dtype; and rows move by all-to-alls."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from jaxtrain.mesh.sharding import Sharder
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


MOVES = {
    "fsdp": {"batch": ("fsdp",), "embed": ("fsdp",)},
    "fsdp_and_context": {
        "batch": ("fsdp",), "sequence": ("context",), "context": ("context",), "embed": ("fsdp", "context"),
    },
    "and_sequence_parallel": {
        "batch": ("fsdp",), "sequence": ("context", "model"), "context": ("context",), "embed": ("fsdp", "context"),
    },
    "width_over_fsdp_alone": {
        "batch": ("fsdp",), "sequence": ("context",), "context": ("context",), "embed": ("fsdp",),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_rows_move_one_axis_at_a_time_and_are_never_gathered(name: str):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("fsdp", "context", "model"), axis_types=(AxisType.Auto,) * 3)
    rules = MOVES[name]
    sharder = Sharder(mesh, rules)
    module = Embed(32, 16, std=0.02, env=Env(sharder), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    rng = np.random.default_rng(0)
    tokens, g = rng.integers(0, 32, (4, 8), np.int32), rng.normal(size=(4, 8, 16)).astype(np.float32)
    placed = jax.device_put(tokens, sharder.sharding(("batch", "context")))

    def run(state, tokens, g):
        out, pull = jax.vjp(lambda state: nnx.merge(graphdef, state)(tokens), state)
        return out, jax.tree.leaves(pull(g))[0]

    g_placed = jax.device_put(g, sharder.sharding(("batch", "sequence", None)))
    compiled = jax.jit(run).lower(state, placed, g_placed).compile()
    out, gradient = compiled(state, placed, g_placed)
    table = np.asarray(jax.tree.leaves(state)[0])
    np.testing.assert_array_equal(out, table[tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, g)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert out.sharding.is_equivalent_to(sharder.sharding(("batch", "sequence", None)), 3)
    text = compiled.as_text()
    assert text.count(" all-to-all(") == 2 * len(rules["embed"])  # one for each axis and way
    assert not re.findall(r"= f32\[[\d,]*\]\S* (?:collective-permute|all-gather)\(", text)
