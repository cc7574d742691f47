"""The loss contract: every term is (sum, weight), normalised once over the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError

Terms = dict[str, tuple[jax.Array, jax.Array]]


def split_loss_output(output: Any) -> tuple[Terms, Any]:
    """Splits what a model's `loss` returned, terms or (terms, counts), into terms and counts (or None).

    Counts are a pytree of arrays that are sums over the rows of the batch, such as the load of experts. The step sums
    them over microbatches, and the model's `metrics(counts)` computes {name: scalar} from them.

    Returns:
        (terms, counts).
    """
    terms, counts = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    return validate_terms(terms), counts


def validate_terms(terms: Any) -> Terms:
    """Casts loss terms to float32.

    Returns:
        {name: (sum, weight)} of float32 scalars.

    Raises:
        UserError: the terms are not {name: (sum, weight)} of scalars.
    """
    pairs = terms.values() if isinstance(terms, Mapping) else ()
    if not pairs or not all(isinstance(p, tuple) and len(p) == 2 and not any(map(np.ndim, p)) for p in pairs):
        raise UserError("model.type: `loss` must return a dict of terms, each a tuple (sum, weight) of two scalars")
    return {name: (jnp.asarray(s, jnp.float32), jnp.asarray(w, jnp.float32)) for name, (s, w) in terms.items()}


def scales(weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns 1 / weight of every term; 0 if the whole global batch has no weight."""
    return {name: jnp.where(w > 0, 1.0 / jnp.where(w > 0, w, 1.0), 0.0) for name, w in weights.items()}


def total(terms: Terms, scale: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the loss: the sum over terms of sum * scale, a float32 scalar."""
    return sum((terms[name][0] * scale[name] for name in sorted(terms)), jnp.zeros((), jnp.float32))
