"""Recording of a program: losses of some steps, and gradients and updates of the first step, on the host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxtrain.core import xla_options
from jaxtrain.core.program import Program
from jaxtrain.verification.compare import Flat, Recording


class Recorder:
    """Compiled step of a program that also returns its gradients.

    Args:
        program: the program.
        batch: one of its batches.
        as_trained: compile as training does, not fast. Fast code on CPU devices computes a value twice with other
            rounding, where a maximum then does not find the place of its value, and loses a part of the gradient.
    """

    def __init__(self, program: Program, batch: Any, as_trained: bool = False):
        self.program = program
        options = xla_options.fast_compile() if jax.default_backend() == "cpu" and not as_trained else None
        shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state)
        jitted = jax.jit(program.step_with_gradients, out_shardings=(shardings, None, None), compiler_options=options)
        self.compiled = jitted.lower(program.state, batch).compile()

    def gradients(self, state: Any, batch: Any) -> Flat:
        """Gradients of one batch, by path."""
        return flatten(self.compiled(state, batch)[2])

    def record(self, batches: list[Any]) -> Recording:
        """Trains from a fresh state, one step per batch."""
        state, losses = self.program.init(), []
        before = flatten(state["params"])
        gradients, updates, mutable = {}, {}, {}
        for step, batch in enumerate(batches):
            state, metrics, step_gradients = self.compiled(state, batch)
            losses.append(float(metrics["loss"]))
            if step == 0:
                gradients = flatten(step_gradients)
                updates = {path: after - before[path] for path, after in flatten(state["params"]).items()}
                mutable = flatten(state.get("mutable", {}))
        return Recording(losses, gradients, updates, self.compiled.as_text() or "", mutable)


def flatten(tree: Any) -> Flat:
    """Flattens a nested dict to `a/b/c` -> float64 array, in the order of the model."""
    return {
        "/".join(str(part.key) for part in path): np.asarray(jax.device_get(leaf), np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
