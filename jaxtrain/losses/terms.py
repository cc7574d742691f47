"""One loss contract: every term is (sum, weight), normalised once over the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError

Terms = dict[str, tuple[jax.Array, jax.Array]]


def parted(returned: Any) -> tuple[Terms, Any]:
    """Terms, and counts or None, of what a model's `loss` returned: terms, or (terms, counts).

    Counts are a pytree of arrays that are sums over the rows of the batch. The step adds them up over microbatches,
    and the model's `metrics(counts)` makes {name: scalar} of them: for what is no mean over tokens, such as the load
    of experts.
    """
    terms, counts = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    return checked(terms), counts


def checked(terms: Any) -> Terms:
    """Checks the terms that a model's `loss` returned, and casts them to float32. Raises UserError where it is not
    {name: (sum, weight)}.
    """
    pairs = terms.values() if isinstance(terms, Mapping) else ()
    if not pairs or not all(isinstance(p, tuple) and len(p) == 2 and not any(map(np.ndim, p)) for p in pairs):
        raise UserError("model.type: `loss` must return a dict of terms, each a tuple (sum, weight) of two scalars")
    return {name: (jnp.asarray(s, jnp.float32), jnp.asarray(w, jnp.float32)) for name, (s, w) in terms.items()}


def scales(weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """1 / weight of every term; 0 where the whole global batch has no weight."""
    return {name: jnp.where(w > 0, 1.0 / jnp.where(w > 0, w, 1.0), 0.0) for name, w in weights.items()}


def total(terms: Terms, scale: Mapping[str, jax.Array]) -> jax.Array:
    """Loss: the sum over terms of sum * scale, float32 scalar."""
    return sum((terms[name][0] * scale[name] for name in sorted(terms)), jnp.zeros((), jnp.float32))
