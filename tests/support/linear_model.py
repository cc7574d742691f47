"""A user's own model and data, with gradients known by formula: y ~ x w, weighted squares."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.nn.env import constant
from jaxtrain.verification.packed_batch import packed_batch


class Linear(nnx.Module):
    def __init__(self, size: int, *, env, rngs):
        self.env = env
        self.w = env.param(rngs, ("features",), (size,), constant(0.0))

    def loss(self, batch, key):
        error = batch["x"] @ self.env.weight(self.w) - batch["y"]
        return {"square": (jnp.sum(batch["count"] * error**2), jnp.sum(batch["count"]))}


class Foreign(nnx.Module):
    """The same with a bias, and parameters that are flax's own, in two dtypes."""

    def __init__(self, size: int, *, env, rngs):
        self.w = nnx.Param(jnp.ones((size,), jnp.bfloat16), names=("features",))
        self.bias = nnx.Param(jnp.ones((1,), jnp.float32))
        self.stretch = env.param(rngs, (None,), (2,), constant(1.0), dtype=jnp.bfloat16)

    def loss(self, batch, key):
        error = self.stretch[1] * (batch["x"] @ self.w[...]) + self.bias[...] - batch["y"]
        return {"square": (jnp.sum(batch["count"] * error**2), jnp.sum(batch["count"]))}


class Counted(Linear):
    """Returns counts, of which it makes no metrics."""

    def loss(self, batch, key):
        return super().loss(batch, key), jnp.float32(len(batch["x"]))


class Bigrams(nnx.Module):
    """A user's own model of text, that counts 7 FLOPs a token."""

    def __init__(self, *, env, rngs):
        self.table = env.param(rngs, (None,), (256,), constant(0.0))

    def loss(self, batch, key):
        return {"count": (jnp.sum(self.table.get_value()[batch["tokens"] % 256]), jnp.float32(batch["tokens"].size))}

    def flops(self, shapes):
        return 7 * np.prod(shapes["tokens"])


class Packed:
    """A user's own data for the decoder."""

    def __init__(self, split, seed, global_batch):
        self.rows = global_batch

    def batch(self, step, rows=None):
        return {name: value[rows] for name, value in packed_batch(step, self.rows, 64, 256).items()}


class Spread(Linear):
    """Squares of the distance from the mean of y, weighted by count: a term that must know the whole batch."""

    def statistics(self, batch, key):
        return {"y": jnp.sum(batch["count"] * batch["y"]), "count": jnp.sum(batch["count"])}

    def loss(self, batch, key):
        whole = batch.get("statistics", self.statistics(batch, key))
        error = batch["x"] @ self.env.weight(self.w) - batch["y"] + whole["y"] / whole["count"]
        return {"square": (jnp.sum(batch["count"] * error**2), jnp.sum(batch["count"]))}


def batch(rows: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(rows, size)), rng.normal(size=rows)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "count": np.arange(1, rows + 1, dtype=np.float32)}
