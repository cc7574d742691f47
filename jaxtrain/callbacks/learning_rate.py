"""Learning rates in the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.callbacks.base import Callback, TrainerView

ESTIMATES = ("estim_lr", "learning_rate")  # fields of optimizers that find their learning rate


class LearningRateMonitor(Callback):
    """Logs the learning rates that are in the optimizer's state, and those of parameter groups.

    The record of a step has `lr` already, if the config has the schedule. This adds `lr/NAME`: the hyperparameters of
    `optax.inject_hyperparams`, estimates of optimizers such as prodigy, and `lr` times the factor of each group.
    """

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Adds the rates of a step that will be logged. Does not wait for it."""
        if step % trainer.config.log.every and step != trainer.config.steps:
            return
        found = dict(hyperparameters(trainer.state["opt_state"]))
        if found:
            trainer.add_metrics(_copies(found))
        if (rate := trainer.on_device.get("lr")) is not None:
            groups = trainer.config.optimizer.groups
            trainer.add_metrics({f"lr/{','.join(group.match)}": rate * group.lr_factor for group in groups})


@jax.jit
def _copies(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, values)


def hyperparameters(state: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yields the scalar hyperparameters in the state of an optimizer, as `lr/NAME`."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, "_fields"))
    for node in nodes:
        if not hasattr(node, "_fields"):
            continue
        injected = getattr(node, "hyperparams", {})
        own = {name: getattr(node, name) for name in ESTIMATES if hasattr(node, name)}
        for name, value in {**injected, **own}.items():
            if isinstance(value, jax.Array) and value.ndim == 0:
                yield f"lr/{name}", value
        for field in node:
            yield from hyperparameters(field)
