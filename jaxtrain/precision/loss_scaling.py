"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv 1710.03740)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

INITIAL_SCALE, MAX_SCALE, MIN_SCALE = 2.0**15, 2.0**24, 2.0**-14
GROWTH_INTERVAL = 1000  # finite steps before the scale doubles

LossScale = dict[str, jax.Array]  # `scale` float32; `good` int32, finite steps since it changed


def initial_loss_scale() -> LossScale:
    """Returns the loss scale of step 0."""
    return {"scale": jnp.float32(INITIAL_SCALE), "good": jnp.int32(0)}


def update_loss_scale(scaling: LossScale, is_finite: jax.Array) -> LossScale:
    """Returns the scale halved if the gradients are not finite, or doubled after `GROWTH_INTERVAL` finite steps."""
    scale, good = scaling["scale"], scaling["good"] + 1
    is_due = good >= GROWTH_INTERVAL
    grown = jnp.where(is_due, jnp.minimum(2 * scale, MAX_SCALE), scale)
    return {
        "scale": jnp.where(is_finite, grown, jnp.maximum(scale / 2, MIN_SCALE)),
        "good": jnp.where(is_finite & ~is_due, good, 0),
    }
