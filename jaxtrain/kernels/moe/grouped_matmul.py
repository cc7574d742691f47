"""The feed-forward layers of several experts on rows sorted by expert. Shapes: G experts, R rows, D embed, F mlp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Weights = tuple[tuple[Array, ...], Array]  # ((gate and up, or up alone) [G, D, F], down [G, F, D])
Hidden = Callable[..., Array]  # hidden activations of the results of the first matrices


def feed_forward(hidden: Hidden, x: Array, weights: Weights) -> Array:
    """One expert on [.., R, D], or with a leading dim on `x` and the weights each expert on its own rows."""
    inner, down = weights
    return hidden(*(x @ w for w in inner)) @ down


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped(hidden: Hidden, block: int, x_RD: Array, weights: Weights, start_G: Array, size_G: Array) -> Array:
    """Every expert on its own rows, block by block, and no work on blocks that are empty.

    `lax.ragged_dot` computes every group on all rows on CPU and CUDA. The hidden activations are not kept but
    computed again in the backward pass: for a worst-case number of rows they would be most of the memory.

    Args:
        hidden: see `Hidden`; it maps zeros to zeros.
        block: rows of one matmul.
        x_RD: rows; those of expert g are [start, start + size), zeros up to the next multiple of `block`.
        weights: of G experts.
        start_G: int32, multiples of `block`.
        size_G: int32.

    Returns:
        [R, D] in the dtype of `x_RD`; zeros in rows of no expert.
    """

    def expert(y_RD: Array, inputs: Any) -> tuple[Array, None]:
        own, start, size = inputs

        def one(at: Array, y_RD: Array) -> Array:
            return _put(y_RD, feed_forward(hidden, _get(x_RD, at, block), own), at)

        return _blocks(one, y_RD, start, size, block), None

    return lax.scan(expert, jnp.zeros_like(x_RD), (weights, start_G, size_G))[0]


def _grouped_fwd(hidden, block, x_RD, weights, start_G, size_G):
    return grouped(hidden, block, x_RD, weights, start_G, size_G), (x_RD, weights, start_G, size_G)


def _grouped_bwd(hidden, block, residuals, g_RD):
    x_RD, weights, start_G, size_G = residuals

    def expert(dx_RD: Array, inputs: Any) -> tuple[Array, Any]:
        own, start, size = inputs

        def one(at: Array, carry: Any) -> Any:
            dx_RD, sums = carry
            _, pull = jax.vjp(partial(feed_forward, hidden), _get(x_RD, at, block), own)
            dx, more = pull(_get(g_RD, at, block))
            return _put(dx_RD, dx, at), jax.tree.map(lambda s, m: s + m.astype(s.dtype), sums, more)

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), own)
        dx_RD, sums = _blocks(one, (dx_RD, zeros), start, size, block)
        return dx_RD, jax.tree.map(lambda s, w: s.astype(w.dtype), sums, own)

    dx_RD, dw = lax.scan(expert, jnp.zeros_like(x_RD), (weights, start_G, size_G))
    return dx_RD, dw, None, None


grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _blocks(one: Callable[[Array, Any], Any], carry: Any, start: Array, size: Array, block: int) -> Any:
    """`one(first row, carry)` for every block of an expert."""
    return lax.fori_loop(0, -(-size // block), lambda i, carry: one(start + i * block, carry), carry)


def _get(x_RD: Array, at: Array, block: int) -> Array:
    return lax.dynamic_slice_in_dim(x_RD, at, block)


def _put(x_RD: Array, rows: Array, at: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x_RD, rows.astype(x_RD.dtype), at, 0)
