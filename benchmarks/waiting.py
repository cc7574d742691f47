"""A model for pipeline.py whose layers take time but no core: each pass of a layer waits.

Eight stages on two cores then wait in parallel, as eight devices would compute in parallel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.env import normal
from jaxtrain.nn.stack import scan, stacked
from jaxtrain.sharding.sharder import Sharder


def waited(seconds: float, sharder: Sharder, x: Array) -> Array:
    """`x`, after a delay."""

    def wait(x: Array) -> np.ndarray:
        time.sleep(seconds)
        return np.asarray(x)

    def call(x: Array) -> Array:
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    # JAX lowers callbacks in code that is manual over all mesh axes alone.
    return call(x) if sharder.mesh is None else sharder.shard_map(call, P(), P())(x)


def matmul(seconds: Sequence[float], sharder: Sharder) -> Callable[[Array, Array], Array]:
    """`x @ w`, which takes `seconds` forward, for the gradient of x, and for that of w."""
    forward, backward, weight = seconds

    @jax.custom_vjp
    def run(x: Array, w: Array) -> Array:
        return waited(forward, sharder, x @ w)

    def pull(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
        x, w = kept
        return waited(backward, sharder, dy @ w.T), waited(weight, sharder, x.T @ dy)

    run.defvjp(lambda x, w: (run(x, w), (x, w)), pull)
    return run


class Layer(nnx.Module):
    """One square matrix."""

    def __init__(self, size: int, *, env: Any, rngs: nnx.Rngs):
        self.w = env.param(rngs, ("embed", "mlp"), (size, size), normal(0.3))


class Waiting(nnx.Module):
    """Stack of layers with a squared-error loss against y.

    seconds: of a layer's forward pass, its input's gradient and its weight's gradient.
    """

    def __init__(self, size: int, layers: int, seconds: Sequence[float], *, env: Any, rngs: nnx.Rngs):
        self.env, self.seconds = env, tuple(seconds)
        self.layers = stacked(lambda rngs: Layer(size, env=env, rngs=rngs), layers, rngs)

    def loss(self, batch: Any, key: Array) -> Any:
        """Loss of the whole model."""
        return self.head_loss(self.run_layers(self.embed_inputs(batch, key), batch, key)[0], batch, key)

    def embed_inputs(self, batch: Any, key: Array) -> Array:
        """Input activations [rows, size]."""
        return batch["x"]

    def run_layers(self, x: Array, batch: Any, key: Array, layers: Array | None = None) -> Any:
        """Runs the layers; no loss terms and no counts."""
        dot = matmul(self.seconds, self.env.sharder)

        def step(layer: Layer, x: Array, _: Any, index: int) -> tuple[Array, None]:
            return x + dot(jnp.tanh(x), self.env.weight(layer.w)), None

        return scan(self.layers, step, x, env=self.env)[0], {}, {}

    def head_loss(self, x: Array, batch: Any, key: Array) -> Any:
        """Squared error."""
        return {"square": (jnp.sum((x.sum(-1) - batch["y"]) ** 2), jnp.float32(x.shape[0]))}


def batch(rows: int, size: int) -> dict[str, np.ndarray]:
    """x [rows, size], y [rows]."""
    rng = np.random.default_rng(3)
    return {"x": rng.normal(size=(rows, size)).astype(np.float32), "y": rng.normal(size=rows).astype(np.float32)}
