"""Linear regression as a user writes it: a plain module, a loss function, and data by step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

ROWS, FEATURES, TARGETS = 16, 8, 2


class Linear(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(nnx.initializers.normal()(rngs.params(), (FEATURES, TARGETS)))

    def __call__(self, x):
        return x @ self.weight


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


class Points:
    """Rows as a pure function of the step. The targets are the sum of the features."""

    @staticmethod
    def example():
        return {name: np.zeros((1, size), np.float32) for name, size in (("x", FEATURES), ("y", TARGETS))}

    def batch(self, step, rows=slice(None)):
        x = np.random.default_rng(step).standard_normal((ROWS, FEATURES)).astype(np.float32)
        return {"x": x[rows], "y": x[rows] @ np.ones((FEATURES, TARGETS), np.float32)}


class ReadablePoints(Points):
    """The same for a config, which gives the split, the seed and the batch."""

    def __init__(self, split: str, seed: int, global_batch: int) -> None:
        assert global_batch == ROWS
