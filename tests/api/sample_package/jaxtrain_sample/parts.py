"""What the entry points of this package name."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxtrain


class Regression(nnx.Module):
    """A linear model with its loss."""

    def __init__(self, rngs: nnx.Rngs, width: int = 4) -> None:
        self.linear = nnx.Linear(width, 1, rngs=rngs)

    def loss(self, batch, key):
        return jnp.square(self.linear(batch["x"]) - batch["y"]).mean()


class Points:
    """Points on a plane, as a pure function of (seed, step)."""

    def __init__(self, split: str, seed: int, global_batch: int, width: int = 4) -> None:
        self._key, self._shape = (seed, split == "train"), (global_batch, width)

    def batch(self, step: int, rows=None):
        x = np.random.default_rng([*self._key, step]).standard_normal(self._shape).astype(np.float32)
        rows = slice(None) if rows is None else rows
        return {"x": x[rows], "y": x.sum(1, keepdims=True)[rows]}


def signs(learning_rate: optax.ScalarOrSchedule, scale: float = 1.0) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_sign(), optax.scale(scale), optax.scale_by_learning_rate(learning_rate))


class StopAt(jaxtrain.Callback):
    """Asks to stop after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer, step):
        if step == self._step:
            trainer.request_stop("far enough")


class LossFile(jaxtrain.Tracker):
    """Writes losses into a file of the run."""

    def __init__(self, run_dir: Path, file: str = "losses.json") -> None:
        self._file, self._losses = run_dir / file, {}

    def log(self, step, values):
        self._losses[step] = values["loss"]
        self._file.write_text(json.dumps(self._losses))


def largest_error(model, batch):
    """A mean of the rows, which is a metric of validation."""
    return jnp.abs(model.linear(batch["x"]) - batch["y"]).mean()


def share_below_one(model, batch):
    """(sum, weight)."""
    error = jnp.abs(model.linear(batch["x"]) - batch["y"])
    return (error < 1).sum(), error.size
