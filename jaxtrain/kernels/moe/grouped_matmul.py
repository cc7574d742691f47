"""Feed-forward layers of several experts on rows sorted by expert. Shapes: G experts, R rows, D embed, F mlp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Weights = tuple[tuple[Array, ...], Array]  # ((gate and up, or up alone) [G, D, F], down [G, F, D])
Hidden = Callable[..., Array]  # hidden activations from the results of the first matrices


def feed_forward(hidden: Hidden, x: Array, weights: Weights) -> Array:
    """Computes one expert on [.., R, D], or, with a leading dim on `x` and the weights, each expert on its rows."""
    inner, down = weights
    return hidden(*(x @ w for w in inner)) @ down


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped(hidden: Hidden, block: int, x_RD: Array, weights: Weights, start_G: Array, size_G: Array) -> Array:
    """Computes every expert on its rows, block by block, and skips empty blocks.

    `lax.ragged_dot` computes every group on all rows on CPU and CUDA. The backward pass recomputes the hidden
    activations: for a worst-case number of rows they would take most of the memory.

    Args:
        hidden: see `Hidden`; must map zeros to zeros.
        block: rows of one matmul.
        x_RD: rows; those of expert g are [start, start + size), zeros up to the next multiple of `block`.
        weights: of G experts.
        start_G: int32, multiples of `block`.
        size_G: int32.

    Returns:
        [R, D] in the dtype of `x_RD`; zeros in rows of no expert.
    """

    def expert(y_RD: Array, inputs: Any) -> tuple[Array, None]:
        expert_weights, start, size = inputs

        def run_block(first: Array, y_RD: Array) -> Array:
            return _set_rows(y_RD, feed_forward(hidden, _rows(x_RD, first, block), expert_weights), first)

        return _blocks(run_block, y_RD, start, size, block), None

    return lax.scan(expert, jnp.zeros_like(x_RD), (weights, start_G, size_G))[0]


def _grouped_fwd(hidden, block, x_RD, weights, start_G, size_G):
    return grouped(hidden, block, x_RD, weights, start_G, size_G), (x_RD, weights, start_G, size_G)


def _grouped_bwd(hidden, block, residuals, g_RD):
    x_RD, weights, start_G, size_G = residuals

    def expert(dx_RD: Array, inputs: Any) -> tuple[Array, Any]:
        expert_weights, start, size = inputs

        def run_block(first: Array, carry: Any) -> Any:
            dx_RD, sums = carry
            _, pullback = jax.vjp(partial(feed_forward, hidden), _rows(x_RD, first, block), expert_weights)
            dx, block_grads = pullback(_rows(g_RD, first, block))
            return _set_rows(dx_RD, dx, first), jax.tree.map(lambda s, m: s + m.astype(s.dtype), sums, block_grads)

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), expert_weights)
        dx_RD, sums = _blocks(run_block, (dx_RD, zeros), start, size, block)
        return dx_RD, jax.tree.map(lambda s, w: s.astype(w.dtype), sums, expert_weights)

    dx_RD, dw = lax.scan(expert, jnp.zeros_like(x_RD), (weights, start_G, size_G))
    return dx_RD, dw, None, None


grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _blocks(run_block: Callable[[Array, Any], Any], carry: Any, start: Array, size: Array, block: int) -> Any:
    """Calls `run_block(first row, carry)` for every block of an expert."""
    return lax.fori_loop(0, -(-size // block), lambda i, carry: run_block(start + i * block, carry), carry)


def _rows(x_RD: Array, start: Array, block: int) -> Array:
    return lax.dynamic_slice_in_dim(x_RD, start, block)


def _set_rows(x_RD: Array, rows: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x_RD, rows.astype(x_RD.dtype), start, 0)
