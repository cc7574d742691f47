"""Detection of spikes in the loss and the gradient norm, by a robust z-score over the last steps.

It runs in the compiled step, before the update. The window is part of the train state, so a resumed run decides as an
uninterrupted one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WINDOW = 64  # steps in the window
MIN_STEPS = 16  # steps before any score
MAD_TO_STD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
MIN_RELATIVE_STD = 0.01  # smallest deviation, relative to the median: smooth losses have almost none

Window = dict[str, jax.Array]


def initial() -> Window:
    """Returns an empty window: `values` float32 [2, WINDOW], a ring of losses and norms; `count` int32, steps seen."""
    return {"values": jnp.full((2, WINDOW), jnp.nan, jnp.float32), "count": jnp.int32(0)}


def score(window: Window, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns the larger robust z-score, float32 scalar: deviations above the median; 0 in the first steps."""
    median = jnp.nanmedian(window["values"], axis=1)
    deviation = MAD_TO_STD * jnp.nanmedian(jnp.abs(window["values"] - median[:, None]), axis=1)
    smallest = jnp.maximum(MIN_RELATIVE_STD * jnp.abs(median), jnp.finfo(jnp.float32).tiny)
    values = jnp.stack([loss, norm]).astype(jnp.float32)
    z = jnp.max((values - median) / jnp.maximum(deviation, smallest))
    return jnp.where(window["count"] >= MIN_STEPS, z, 0.0)


def push(window: Window, loss: jax.Array, norm: jax.Array) -> Window:
    """Returns the window with one more step, also a spike; unchanged by a step that is not finite."""
    values = jnp.stack([loss, norm]).astype(jnp.float32)
    is_finite = jnp.all(jnp.isfinite(values))
    is_slot = jnp.arange(WINDOW) == window["count"] % WINDOW
    new = jnp.where(is_finite & is_slot[None, :], values[:, None], window["values"])
    return {"values": new, "count": window["count"] + is_finite.astype(jnp.int32)}
