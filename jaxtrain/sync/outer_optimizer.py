"""The outer optimizer: SGD with momentum on the average change of the replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.sections.sync import OuterConfig

Tree = Any


def outer_step(config: OuterConfig, own: dict[str, Tree], mean: Tree) -> dict[str, Tree]:
    """Returns `outer`, and `velocity` with momentum, after a step of torch.optim.SGD.

    Args:
        config: its options.
        own: both before it, float32.
        mean: average of the replicas' parameters, float32.
    """
    lr, momentum = config.lr, config.momentum
    if lr == 1 and not momentum:
        return {"outer": mean}  # copied: x - (x - mean) would be rounded
    change = jax.tree.map(jnp.subtract, own["outer"], mean)
    if not momentum:
        return {"outer": jax.tree.map(lambda x, d: x - lr * d, own["outer"], change)}
    velocity = jax.tree.map(lambda v, d: momentum * v + d, own["velocity"], change)
    step = velocity
    if config.nesterov:
        step = jax.tree.map(lambda v, d: d + momentum * v, velocity, change)
    return {"outer": jax.tree.map(lambda x, s: x - lr * s, own["outer"], step), "velocity": velocity}
