"""Options and mask of an attention call."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

RESIDUALS = "attention"  # checkpoint name of the residuals of a fused kernel: its output and statistics
MASKED = -1e30  # finite, because -inf gives NaN in fully masked rows


@dataclass(frozen=True)
class AttnSpec:
    """Options of one attention call.

    Attributes:
        causal: tokens do not attend to later ones.
        window: tokens visible on the left, including the token itself (without `causal` as many on the right); an int,
            or a traced int32 scalar that differs from layer to layer.
        softcap: cap of the scores by tanh.
        scale: factor of the scores.
    """

    causal: bool
    window: int | Array | None
    softcap: float | None
    scale: float

    @property
    def traced_window(self) -> Array | None:
        """The window if it is traced, None if it is an int."""
        return None if isinstance(self.window, int) else self.window

    @property
    def static_window(self) -> int | None:
        """The window if it is an int, None if it is traced."""
        return self.window if isinstance(self.window, int) else None


@dataclass(frozen=True)
class TokenOrder:
    """Segments and order of the queries [batch, time] and of the keys [batch, source], which determine the mask.

    Segment 0 is padding: it attends to nothing, and nothing attends to it. `order` None means the index in the array.
    """

    segments_BT: Array | None = None
    kv_segments_BS: Array | None = None
    order_BT: Array | None = None
    kv_order_BS: Array | None = None


def attention_mask(
    spec: AttnSpec, tokens: TokenOrder, query: slice, source: slice, first: Array | int = 0
) -> Array | None:
    """Returns the boolean mask [batch or 1, queries, keys] of a block, or None if everything is visible.

    Args:
        spec: the options.
        tokens: with `segments_BT` and `order_BT` of the block's queries only.
        query: indices of the block's queries, relative to `first`.
        source: indices of the block's keys.
        first: offset of the queries' indices, may be traced.
    """
    mask = None
    if spec.causal or spec.window is not None:
        if tokens.order_BT is None or tokens.kv_order_BS is None:
            q = (first + jnp.arange(query.start, query.stop, dtype=jnp.int32))[None]
            k = jnp.arange(source.start, source.stop, dtype=jnp.int32)[None]
        else:
            q, k = tokens.order_BT, tokens.kv_order_BS[:, source]
        distance = q[:, :, None] - k[:, None, :]  # from the key to the query
        mask = distance >= 0 if spec.causal else None
        if spec.window is not None:
            near = (distance if spec.causal else jnp.abs(distance)) < spec.window
            mask = near if mask is None else mask & near
    if tokens.segments_BT is not None and tokens.kv_segments_BS is not None:
        q, k = tokens.segments_BT[:, :, None], tokens.kv_segments_BS[:, None, source]
        same = (q == k) & (q != 0)
        mask = same if mask is None else mask & same
    return mask
