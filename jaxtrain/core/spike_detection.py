"""Spikes of the loss and of the gradient norm, by a robust z-score over the last steps: in the graph, before an update.

The window is part of the train state, small and replicated, so that a resumed run judges as an undisturbed one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WINDOW = 64  # steps that are looked back on
LEAST = 16  # steps before anything is judged
DEVIATION = 1.4826  # of a normal distribution, over its median absolute deviation
FLOOR = 0.01  # share of the median that a deviation has at least: smooth losses have next to none

Window = dict[str, jax.Array]


def initial() -> Window:
    """`values` float32 [2, WINDOW], losses and norms of the last steps in a ring; `count` int32, steps seen."""
    return {"values": jnp.full((2, WINDOW), jnp.nan, jnp.float32), "count": jnp.int32(0)}


def score(window: Window, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """The larger of both robust z-scores, float32 scalar: deviations above the median; 0 while too little is known."""
    median = jnp.nanmedian(window["values"], axis=1)
    spread = DEVIATION * jnp.nanmedian(jnp.abs(window["values"] - median[:, None]), axis=1)
    least = jnp.maximum(FLOOR * jnp.abs(median), jnp.finfo(jnp.float32).tiny)
    now = jnp.stack([loss, norm]).astype(jnp.float32)
    z = jnp.max((now - median) / jnp.maximum(spread, least))
    return jnp.where(window["count"] >= LEAST, z, 0.0)


def pushed(window: Window, loss: jax.Array, norm: jax.Array) -> Window:
    """The window with one more step, spikes included, or as it was after a step that is not finite."""
    now = jnp.stack([loss, norm]).astype(jnp.float32)
    is_finite = jnp.all(jnp.isfinite(now))
    place = jnp.arange(WINDOW) == window["count"] % WINDOW
    values = jnp.where(is_finite & place[None, :], now[:, None], window["values"])
    return {"values": values, "count": window["count"] + is_finite.astype(jnp.int32)}
