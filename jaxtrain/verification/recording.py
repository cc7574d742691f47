"""Recording of a program: losses of some steps, and the first step's gradients and updates, on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.core import xla_options
from jaxtrain.core.program import Program

Flat = dict[str, np.ndarray]
Place = Callable[[Mapping[str, np.ndarray]], Any]


@dataclass(frozen=True)
class Seen:
    """losses: one per step. gradients, updates: of step 0, by path, float64. text: the compiled program."""

    losses: list[float]
    gradients: Flat
    updates: Flat
    text: str


class Runner:
    """A compiled step of a program that also gives its gradients."""

    def __init__(self, program: Program, example: Any):
        self.program = program

        fast = xla_options.quickly() if jax.default_backend() == "cpu" else None
        placed = jax.tree.map(lambda leaf: leaf.sharding, program.state)
        jitted = jax.jit(program.step_with_gradients, out_shardings=(placed, None, None), compiler_options=fast)
        self.compiled = jitted.lower(program.state, example).compile()

    def gradients(self, state: Any, batch: Any) -> Flat:
        """Returns the gradients of one batch, by path."""
        return flat(self.compiled(state, batch)[2])

    def observe(self, batches: list[Any]) -> Seen:
        """Trains from a fresh state, a step per batch."""
        state, losses = self.program.init(), []
        before = flat(state["params"])
        grads, updates = {}, {}
        for index, batch in enumerate(batches):
            state, metrics, found = self.compiled(state, batch)
            losses.append(float(metrics["loss"]))
            if index == 0:
                after = flat(state["params"])
                grads, updates = flat(found), {path: after[path] - before[path] for path in after}
        return Seen(losses, grads, updates, self.compiled.as_text() or "")


def flat(tree: Any) -> Flat:
    """`a/b/c` -> float64 array of a nested dict, in the model's order."""
    return {
        "/".join(str(part.key) for part in path): np.asarray(jax.device_get(leaf), np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
