"""One loss contract: every term is (sum, weight), normalised once over the global batch."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

Terms = dict[str, tuple[jax.Array, jax.Array]]


def scales(weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """1 / weight of every term; 0 where the whole global batch has no weight."""
    return {name: jnp.where(w > 0, 1.0 / jnp.where(w > 0, w, 1.0), 0.0) for name, w in weights.items()}


def total(terms: Terms, scale: Mapping[str, jax.Array]) -> jax.Array:
    """Loss: the sum over terms of sum * scale, float32 scalar."""
    return sum((terms[name][0] * scale[name] for name in sorted(terms)), jnp.zeros((), jnp.float32))
