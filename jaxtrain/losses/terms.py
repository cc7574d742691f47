"""The loss contract: every term is (sum, weight), normalised once over the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import MAX_VALUE_LENGTH, UserError

Terms = dict[str, tuple[jax.Array, jax.Array]]


def split_loss_output(output: Any, rows: int) -> tuple[Terms, Any]:
    """Splits what a loss returned into terms and counts (or None).

    A loss returns terms, or (terms, counts). Terms are {name: (sum, weight)}, or one pair, which is then called `loss`.
    A scalar in place of a pair is a mean, which is weighted by the rows of the microbatch: several microbatches give
    the mean of their means.

    Counts are a pytree of arrays that are sums over the rows of the batch, such as the load of experts. The step sums
    them over microbatches, and the model's `metrics(counts)` computes {name: scalar} from them. A model without such a
    method may return {name: scalar or (sum, weight)}, whose means are shown as metrics.

    Args:
        output: of the loss.
        rows: of the microbatch.

    Returns:
        (terms, counts).

    Raises:
        UserError: the terms have another form.
    """
    has_counts = isinstance(output, tuple) and len(output) == 2 and not _is_pair(output)
    terms, counts = output if has_counts else (output, None)
    named = terms if isinstance(terms, Mapping) else {"loss": terms}
    return validate_terms({name: _mean_of(rows, value) for name, value in named.items()}), counts


def has_means(output: Any) -> bool:
    """Returns whether a loss returned a mean: a scalar in place of (sum, weight)."""
    terms = output[0] if isinstance(output, tuple) and len(output) == 2 and not _is_pair(output) else output
    return any(map(_is_scalar, terms.values() if isinstance(terms, Mapping) else [terms]))


def as_pairs(counts: Any, rows: int) -> Any:
    """Returns counts {name: scalar or (sum, weight)} as {name: (sum, weight)}, so that they can be summed.

    A scalar is a mean, weighted by the rows. Counts of another form are returned unchanged.
    """
    pairs = {k: _mean_of(rows, v) for k, v in counts.items()} if isinstance(counts, Mapping) else {}
    return validate_terms(pairs) if are_pairs(pairs) else counts


def are_pairs(counts: Any) -> bool:
    """Returns whether counts are {name: (sum, weight)}."""
    is_named = isinstance(counts, Mapping) and bool(counts) and all(isinstance(name, str) for name in counts)
    return is_named and all(map(_is_pair, counts.values()))


def means(terms: Terms) -> dict[str, jax.Array]:
    """Returns sum / weight of every term."""
    return {name: terms[name][0] * scale for name, scale in scales({k: w for k, (_, w) in terms.items()}).items()}


def _mean_of(rows: int, value: Any) -> Any:
    return (jnp.asarray(value, jnp.float32) * rows, jnp.float32(rows)) if _is_scalar(value) else value


def _is_scalar(value: Any) -> bool:
    is_number = isinstance(value, (int, float, jax.Array, np.ndarray, np.generic)) and np.ndim(value) == 0
    return is_number and not jnp.iscomplexobj(value)


def _is_pair(value: Any) -> bool:
    """Returns whether this is (sum, weight)."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_scalar, value))


def validate_terms(terms: Any) -> Terms:
    """Casts loss terms to float32.

    Returns:
        {name: (sum, weight)} of float32 scalars.

    Raises:
        UserError: the terms are not {name: (sum, weight)} of scalars.
    """
    if not are_pairs(terms):
        raise UserError(
            "model.type: `loss` must return a dict of terms, each a tuple (sum, weight) of two scalars, or a mean; "
            f"found {_described(terms)}"
        )
    return {name: (jnp.asarray(s, jnp.float32), jnp.asarray(w, jnp.float32)) for name, (s, w) in terms.items()}


def _described(value: Any) -> str:
    """Returns what a loss returned, in one line: arrays by dtype and shape."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"{value.dtype.name}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_described(term)}' for name, term in value.items())}}}"
    if isinstance(value, (tuple, list)):
        members = ", ".join(map(_described, value))
        return f"({members})" if isinstance(value, tuple) else f"[{members}]"
    return repr(value).partition("\n")[0][:MAX_VALUE_LENGTH]


def scales(weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns 1 / weight of every term; 0 if the whole global batch has no weight."""
    return {name: jnp.where(w > 0, 1.0 / jnp.where(w > 0, w, 1.0), 0.0) for name, w in weights.items()}


def total(terms: Terms, scale: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the loss: the sum over terms of sum * scale, a float32 scalar."""
    return sum((terms[name][0] * scale[name] for name in sorted(terms)), jnp.zeros((), jnp.float32))
