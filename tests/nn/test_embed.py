"""Lookups and gradients against numpy wherever the table and the tokens lie; the gradient is added up in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jaxtrain.nn.embed import Embed
from jaxtrain.nn.env import Env
from jaxtrain.precision.policy import POLICIES
from jaxtrain.sharding.sharder import Sharder


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_a_frequent_token_keeps_all_of_its_gradient(precision: str):
    env = Env(policy=POLICIES[precision])
    module = Embed(8, 4, tied=False, std=0.02, env=env, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    tokens = jnp.full((4, 2048), 3, jnp.int32)

    def total(state):
        return jnp.sum(nnx.merge(graphdef, state)(tokens).astype(jnp.float32))

    gradient = jax.tree.leaves(jax.jit(jax.grad(total))(state))[0]
    # 8192 ones: a bfloat16 sum would stop at 256.
    np.testing.assert_array_equal(np.asarray(gradient[3], np.float32), np.full(4, 8192.0))
    assert not np.any(np.asarray(gradient, np.float32)[[0, 1, 2, 4]])


VOCAB, WIDTH = 32, 16
BATCH = ("data", "fsdp")
# name -> mesh, rules, ZeRO stage, PartitionSpec of the gradient
PLACES = {
    "replicas": ({"data": 8}, {"batch": BATCH}, 0, (None, None)),
    "replicas_zero1": ({"data": 8}, {"batch": BATCH}, 1, (None, "data")),
    "tensor": ({"data": 2, "model": 4}, {"batch": BATCH, "vocab": ("model",)}, 0, ("model", None)),
    "tensor_sequence": (
        {"data": 2, "model": 4}, {"batch": BATCH, "vocab": ("model",), "sequence": ("model",)}, 1, ("model", "data"),
    ),
    "all": (
        {"data": 2, "fsdp": 2, "model": 2},
        {"batch": BATCH, "vocab": ("model",), "sequence": ("model",), "embed": ("fsdp",)}, 0, ("model", "fsdp"),
    ),
    "all_zero3": (
        {"data": 2, "fsdp": 2, "model": 2},
        {"batch": BATCH, "vocab": ("model",), "sequence": ("model",), "embed": ("fsdp",)}, 3,
        ("model", ("fsdp", "data")),
    ),
    "context": (
        {"fsdp": 2, "context": 2, "model": 2},
        {
            "batch": BATCH, "vocab": ("model",), "sequence": ("context", "model"), "context": ("context",),
            "embed": ("fsdp", "context"),
        }, 0, ("model", ("fsdp", "context")),
    ),
    "context_outside_width": (
        {"fsdp": 2, "context": 2, "model": 2},
        {"batch": BATCH, "vocab": ("model",), "sequence": ("context", "model"), "embed": ("fsdp",)}, 0,
        ("model", "fsdp"),
    ),
    "vocabulary_whole": (
        {"fsdp": 2, "context": 2, "model": 2},
        {"batch": BATCH, "sequence": ("model", "context"), "embed": ("fsdp", "context")}, 0,
        (None, ("fsdp", "context")),
    ),
    "expert": (
        {"data": 2, "fsdp": 2, "expert": 2}, {"batch": (*BATCH, "expert"), "embed": ("fsdp", "expert")}, 0,
        (None, ("fsdp", "expert")),
    ),
    "vocabulary_twice": (
        {"data": 2, "fsdp": 2, "model": 2}, {"batch": BATCH, "vocab": ("fsdp", "model")}, 0, (("fsdp", "model"), None),
    ),
    "tokens_whole": ({"fsdp": 4, "model": 2}, {"vocab": ("model",), "embed": ("fsdp",)}, 0, ("model", "fsdp")),
}  # fmt: skip


def placed(mesh: dict[str, int], rules: dict, zero: int) -> Sharder:
    axes = {axis: mesh.get(axis, 1) for axis in ("data", "fsdp", "expert", "context", "model")}
    return Sharder(jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 5), rules, zero)


def reference(table: np.ndarray, tokens: np.ndarray, cotangent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    clipped = np.clip(tokens, 0, VOCAB - 1)
    gradient = np.zeros(table.shape)
    np.add.at(gradient, clipped, cotangent)
    return table[clipped], gradient


def example(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, some out of range, and a cotangent."""
    rng = np.random.default_rng(0)
    return rng.integers(-3, VOCAB + 3, shape).astype(np.int32), rng.normal(size=(*shape, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [None, *PLACES])
def test_rows_and_gradient_equal_numpy(name: str | None, tied: bool):
    mesh, rules, zero, stored = PLACES[name] if name else ({}, {}, 0, ())
    sharder = placed(mesh, rules, zero) if name else Sharder()
    graphdef, state = nnx.split(Embed(VOCAB, WIDTH, tied=tied, std=1.0, env=Env(sharder), rngs=nnx.Rngs(0)))
    tokens, cotangent = example(8, 16)

    @jax.jit
    def run(state):
        rows, back = jax.vjp(lambda state: nnx.merge(graphdef, state)(tokens), state)
        return rows, back(cotangent)[0]

    rows, gradient = run(state)
    (gradient,) = jax.tree.leaves(gradient)
    expected_rows, expected = reference(np.asarray(*jax.tree.leaves(state)), tokens, cotangent)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    if name:
        # One that is no head is sharded over all of these axes by its width.
        axes = [axis for dim in stored for axis in ((dim,) if isinstance(dim, str) else dim or ())]
        want = jax.NamedSharding(sharder.mesh, PartitionSpec(*stored) if tied else PartitionSpec(None, tuple(axes)))
        assert gradient.sharding.is_equivalent_to(want, 2), gradient.sharding


@pytest.mark.parametrize("tied", [True, False])
def test_each_replica_keeps_its_own_gradient_inside_a_map(tied: bool):
    mesh, rules, _, _ = PLACES["all"]
    env = Env(placed(mesh, rules, 0).without_axis("data"))
    graphdef, state = nnx.split(Embed(VOCAB, WIDTH, tied=tied, std=1.0, env=env, rngs=nnx.Rngs(0)))
    tokens, cotangent = example(2, 4, 16)

    def one(state, tokens, cotangent):
        rows, back = jax.vjp(lambda state: nnx.merge(graphdef, state)(tokens[0]), state)
        return rows[None], jax.tree.leaves(back(cotangent[0]))[0][None]

    own = PartitionSpec("data")
    each = placed(mesh, rules, 0).shard_map(one, (PartitionSpec(), own, own), own, axes=("data",))
    rows, gradients = jax.jit(each)(state, tokens, cotangent)
    for replica in range(2):
        expected = reference(np.asarray(*jax.tree.leaves(state)), tokens[replica], cotangent[replica])
        np.testing.assert_array_equal(rows[replica], expected[0])
        np.testing.assert_allclose(gradients[replica], expected[1], rtol=1e-5, atol=1e-5)
    spec = PartitionSpec("data", "model", "fsdp") if tied else PartitionSpec("data", None, ("model", "fsdp"))
    want = jax.NamedSharding(env.sharder.mesh, spec)
    assert gradients.sharding.is_equivalent_to(want, 3), gradients.sharding


@pytest.mark.parametrize("tied", [True, False])
def test_a_frequent_token_keeps_all_of_its_gradient_in_shards(tied: bool):
    mesh, rules, _, _ = PLACES["all"]
    env = Env(placed(mesh, rules, 0), policy=POLICIES["bf16"])
    graphdef, state = nnx.split(Embed(VOCAB, WIDTH, tied=tied, std=1.0, env=env, rngs=nnx.Rngs(0)))
    tokens = jnp.full((8, 1024), 3, jnp.int32)

    def total(state):
        return jnp.sum(nnx.merge(graphdef, state)(tokens).astype(jnp.float32))

    gradient = np.asarray(*jax.tree.leaves(jax.jit(jax.grad(total))(state)))
    np.testing.assert_array_equal(gradient[3], np.full(WIDTH, 8192.0))
