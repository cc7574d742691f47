"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv 1710.03740)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

FIRST, LARGEST, SMALLEST = 2.0**15, 2.0**24, 2.0**-14
PATIENCE = 1000  # good steps before the scale doubles

Scaling = dict[str, jax.Array]


def initial() -> Scaling:
    """`scale` float32 and `good` int32, the steps since it changed: scalars of the train state."""
    return {"scale": jnp.float32(FIRST), "good": jnp.int32(0)}


def updated(scaling: Scaling, is_finite: jax.Array) -> Scaling:
    """Halved after gradients that are not finite, doubled after `PATIENCE` steps that were."""
    scale, good = scaling["scale"], scaling["good"] + 1
    grows = good >= PATIENCE
    up = jnp.where(grows, jnp.minimum(2 * scale, LARGEST), scale)
    return {
        "scale": jnp.where(is_finite, up, jnp.maximum(scale / 2, SMALLEST)),
        "good": jnp.where(is_finite & ~grows, good, 0),
    }
