"""Histograms of parameters and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.callbacks.base import Callback, StepFn, TrainerView
from jaxtrain.checkpoint.state_tree import flatten
from jaxtrain.core.program import Program, State
from jaxtrain.trackers.base import Histogram

Sums = tuple[jax.Array, ...]  # counts, lowest, highest, sum, sum of squares, number of values that are not finite


class Histograms(Callback):
    """Logs histograms of parameters and gradients to TensorBoard and W&B: of a step before its update.

    The gradients are computed once more, so such a step takes about twice as long; training is not changed by it.

    Args:
        every: steps between histograms.
        match: pattern of the paths of parameters; default: all.
        bins: number of bins between the lowest and the highest value.
        gradients: False for the parameters alone, which costs little.
    """

    def __init__(self, every: int = 100, match: str = ".*", bins: int = 64, gradients: bool = True) -> None:
        self.every, self.match, self.bins, self.gradients = every, match, bins, gradients
        self._compute: Callable[[State, Any], dict[str, Sums]] | None = None
        self._found: tuple[int, dict[str, Sums]] | None = None

    def run_step(self, trainer: TrainerView, step_fn: StepFn, state: State, batch: Any, step: int) -> None:
        """Computes the histograms of a step that is due, and leaves the step to the others."""
        if (step + 1) % self.every == 0:
            if self._compute is None:
                self._compute = jax.jit(self._sums_of(trainer.program))
            self._found = step + 1, self._compute(state, batch)

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Logs what was computed in front of this step."""
        if self._found is not None:
            at, sums = self._found
            self._found = None
            trainer.trackers.histograms(at, {name: _histogram(found) for name, found in jax.device_get(sums).items()})

    def _sums_of(self, program: Program) -> Callable[[State, Any], dict[str, Sums]]:
        def compute(state: State, batch: Any) -> dict[str, Sums]:
            trees = {"parameters": state["params"]}
            if self.gradients:
                trees["gradients"] = program.step_with_gradients(state, batch)[2]
            return {
                f"{kind}/{path}": _sums(value, self.bins)
                for kind, tree in trees.items() for path, value in flatten(tree).items()
                if re.fullmatch(self.match, path)
            }  # fmt: skip

        return compute


def _sums(values: jax.Array, bins: int) -> Sums:
    """Returns the parts of a histogram. Every pass is elementwise with a sum, so no shard is gathered."""
    values = values.astype(jnp.float32)
    is_finite = jnp.isfinite(values)
    low = jnp.min(values, where=is_finite, initial=jnp.inf)
    high = jnp.max(values, where=is_finite, initial=-jnp.inf)
    finite = jnp.where(is_finite, values, 0.0)
    width = jnp.where(high > low, high - low, 1.0)
    index = jnp.where(is_finite, jnp.clip((finite - low) / width * bins, 0, bins - 1).astype(jnp.int32), -1)
    counts = jax.lax.map(lambda number: jnp.sum(index == number, dtype=jnp.float32), jnp.arange(bins))
    return counts, low, high, jnp.sum(finite), jnp.sum(finite**2), jnp.sum(~is_finite)


def _histogram(sums: tuple[np.ndarray, ...]) -> Histogram:
    counts, low, high, total, squares, not_finite = sums
    lowest, highest = (float(low), float(high)) if np.isfinite(low) else (0.0, 0.0)
    edges = np.linspace(lowest, highest if highest > lowest else lowest + 1.0, len(counts) + 1)
    return Histogram(counts.astype(np.int64), edges, float(total), float(squares), int(not_finite))
