"""Attention in plain XLA operations, by blocks of queries: runs anywhere, in memory linear in the sequence."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.reference import attend
from jaxtrain.kernels.attention.spec import AttnSpec, TokenOrder, attention_mask

BLOCK = 256
CPU_BLOCK = 64  # scores of a block stay in the cache of a core
MAX_GROUPS = 4


def attention(
    q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, spec: AttnSpec, tokens: TokenOrder, block: int = BLOCK
) -> Array:
    """Computes attention [batch, time, heads, head_dim]; scores exist for `block` queries at a time.

    Blocks form at most `MAX_GROUPS` groups, each with only the keys that its queries may see (this saves 3/8 of the
    work when causal, more with a window). A scan over the blocks of a group prevents their parallel execution. The
    backward pass recomputes the scores of each block. Sequences of at most two blocks are computed at once.
    """
    T, S = q_BTHD.shape[1], k_BSKD.shape[1]
    if 2 * block >= T:
        return attend(q_BTHD, k_BSKD, v_BSKD, attention_mask(spec, tokens, slice(0, T), slice(0, S)), spec)
    count = -(-T // block)
    by_index = tokens.order_BT is None and (spec.causal or spec.static_window is not None)
    group = max(2, -(-count // MAX_GROUPS)) if by_index else count
    outs = []
    for first in range(0, count, group):
        start, stop = first * block, min(T, (first + group) * block)
        keys = _visible_keys(spec, start, stop, S) if by_index else slice(0, S)
        outs.append(_recomputed_group(q_BTHD, k_BSKD, v_BSKD, spec, tokens, slice(start, stop), keys, block))
    return jnp.concatenate(outs, axis=1) if len(outs) > 1 else outs[0]


def _visible_keys(spec: AttnSpec, start: int, stop: int, source: int) -> slice:
    """Returns the keys that queries `start` to `stop` may see, by index."""
    before = 0 if spec.static_window is None else max(0, start - spec.static_window + 1)
    after = stop if spec.causal else source if spec.static_window is None else stop + spec.static_window - 1
    return slice(before, min(source, after))


def _recomputed_group(q, k, v, spec: AttnSpec, tokens: TokenOrder, rows: slice, keys: slice, block: int) -> Array:
    """Computes `_group`, with its arguments as the only residuals.

    A `jax.checkpoint` inside that of a layer would be subject to the outer policy too, which may save all scores.
    """
    fields = (tokens.segments_BT, tokens.kv_segments_BS, tokens.order_BT, tokens.kv_order_BS)

    def group(q: Array, k: Array, v: Array, window: Array | None, *fields: Array | None) -> Array:
        group_case = spec if window is None else replace(spec, window=window)
        return _group(q, k, v, group_case, TokenOrder(*fields), rows, keys, block)

    def backward(arguments: tuple, g: Array) -> tuple:
        return jax.vjp(group, *arguments)[1](g)

    run = jax.custom_vjp(group)
    run.defvjp(lambda *arguments: (group(*arguments), arguments), backward)
    return run(q, k, v, spec.traced_window, *fields)  # a traced value has to be an argument


def _group(q, k, v, spec: AttnSpec, tokens: TokenOrder, rows: slice, keys: slice, block: int) -> Array:
    """Computes attention of the queries `rows` to the keys `keys`, a block of queries at a time."""
    size = rows.stop - rows.start
    block = min(block, size)
    count = -(-size // block)
    k, v = k[:, keys], v[:, keys]

    @jax.checkpoint
    def attend_block(first, q, segments, order):
        mask = attention_mask(spec, replace(tokens, segments_BT=segments, order_BT=order), slice(0, block), keys, first)
        return attend(q, k, v, mask, spec)

    def split(x):  # [batch, size, ...] -> [count, batch, block, ...]
        if x is None:
            return None
        x = jnp.pad(x[:, rows], ((0, 0), (0, count * block - size)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    firsts = rows.start + block * jnp.arange(count, dtype=jnp.int32)
    parts = (firsts, split(q), split(tokens.segments_BT), split(tokens.order_BT))
    if count == 1:
        return attend_block(rows.start, *(None if x is None else x[0] for x in parts[1:]))
    _, out = lax.scan(lambda _, xs: (None, attend_block(*xs)), None, parts)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], count * block, *out.shape[3:])[:, :size]
