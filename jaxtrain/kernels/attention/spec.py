"""Specification of an attention call for every kernel: static options and the mask."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

RESIDUALS = "attention"  # checkpoint name of what a fused kernel keeps: its output and its statistics
MASKED = -1e30  # finite: -inf gives NaN in rows that see nothing


@dataclass(frozen=True)
class Case:
    """Options of one attention call.

    `window` is the number of tokens seen on the left, the token itself included (and as many on the right
    without `causal`); an int where known when tracing, or an int32 scalar that differs from layer to layer.
    """

    causal: bool
    window: int | Array | None
    softcap: float | None
    scale: float

    @property
    def span(self) -> int | None:
        """The window where it is known when tracing."""
        return self.window if isinstance(self.window, int) else None


@dataclass(frozen=True)
class TokenOrder:
    """Tokens that may attend to each other: segments and order of the queries [batch, time] and of the keys [batch,
    source].

    Segment 0 is padding and sees nothing, nor is seen. `order` None means the index in the array.
    """

    segments_BT: Array | None = None
    kv_segments_BS: Array | None = None
    order_BT: Array | None = None
    kv_order_BS: Array | None = None


def visible(case: Case, tokens: TokenOrder, query: slice, source: slice, first: Array | int = 0) -> Array | None:
    """Boolean mask [batch or 1, queries, keys] of a block, or None where everything is visible.

    Args:
        case: the options.
        tokens: `segments_BT` and `order_BT` already cut to the block's queries.
        query: indices of the block's queries, less `first`.
        source: indices of the block's keys.
        first: index (it may be traced) to add to the queries'.
    """
    mask = None
    if case.causal or case.window is not None:
        if tokens.order_BT is None or tokens.kv_order_BS is None:
            q = (first + jnp.arange(query.start, query.stop, dtype=jnp.int32))[None]
            k = jnp.arange(source.start, source.stop, dtype=jnp.int32)[None]
        else:
            q, k = tokens.order_BT, tokens.kv_order_BS[:, source]
        ahead = q[:, :, None] - k[:, None, :]  # how far the key lies behind
        mask = ahead >= 0 if case.causal else None
        if case.window is not None:
            near = (ahead if case.causal else jnp.abs(ahead)) < case.window
            mask = near if mask is None else mask & near
    if tokens.segments_BT is not None and tokens.kv_segments_BS is not None:
        q, k = tokens.segments_BT[:, :, None], tokens.kv_segments_BS[:, None, source]
        same = (q == k) & (q != 0)
        mask = same if mask is None else mask & same
    return mask
