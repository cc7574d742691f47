"""Attention in plain XLA, by blocks of queries: runs anywhere, in memory linear in the sequence."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.reference import attend
from jaxtrain.kernels.attention.spec import Case, TokenOrder, visible

BLOCK = 256
CPU_BLOCK = 64  # scores of a block stay in the cache of a core
GROUPS = 4


def attention(q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, case: Case, tokens: TokenOrder, block: int = BLOCK) -> Array:
    """Attention [batch, time, heads, head_dim]; scores exist for `block` queries at a time.

    Blocks come in at most `GROUPS` groups, each with just the keys that its queries may see (3/8 of the work is
    saved when causal, more with a window); inside a group a scan walks the blocks, which also keeps a scheduler
    from running them side by side. The backward pass computes each block's scores again. A sequence of two
    blocks or less is done at once.
    """
    T, S = q_BTHD.shape[1], k_BSKD.shape[1]
    if 2 * block >= T:
        return attend(q_BTHD, k_BSKD, v_BSKD, visible(case, tokens, slice(0, T), slice(0, S)), case)
    count = -(-T // block)
    by_index = tokens.order_BT is None and (case.causal or case.span is not None)
    group = max(2, -(-count // GROUPS)) if by_index else count
    outs = []
    for first in range(0, count, group):
        start, stop = first * block, min(T, (first + group) * block)
        keys = _reach(case, start, stop, S) if by_index else slice(0, S)
        outs.append(_kept(q_BTHD, k_BSKD, v_BSKD, case, tokens, slice(start, stop), keys, block))
    return jnp.concatenate(outs, axis=1) if len(outs) > 1 else outs[0]


def _reach(case: Case, start: int, stop: int, source: int) -> slice:
    """Keys that queries `start` to `stop` may see, by index."""
    before = 0 if case.span is None else max(0, start - case.span + 1)
    after = stop if case.causal else source if case.span is None else stop + case.span - 1
    return slice(before, min(source, after))


def _kept(q, k, v, case: Case, tokens: TokenOrder, rows: slice, keys: slice, block: int) -> Array:
    """`_group`, of which the backward pass keeps the arguments alone.

    A `jax.checkpoint` inside of another one, a layer's, is subject to the outer policy too, which may keep all scores.
    """
    window = None if case.span is not None else case.window  # what is traced has to be an argument
    fields = (tokens.segments_BT, tokens.kv_segments_BS, tokens.order_BT, tokens.kv_order_BS)

    def group(q: Array, k: Array, v: Array, window: Array | None, *fields: Array | None) -> Array:
        own = case if window is None else replace(case, window=window)
        return _group(q, k, v, own, TokenOrder(*fields), rows, keys, block)

    def pull(arguments: tuple, g: Array) -> tuple:
        return jax.vjp(group, *arguments)[1](g)

    run = jax.custom_vjp(group)
    run.defvjp(lambda *arguments: (group(*arguments), arguments), pull)
    return run(q, k, v, window, *fields)


def _group(q, k, v, case: Case, tokens: TokenOrder, rows: slice, keys: slice, block: int) -> Array:
    """Attention of the queries `rows` to the keys `keys`, a block of queries at a time."""
    size = rows.stop - rows.start
    block = min(block, size)
    count = -(-size // block)
    k, v = k[:, keys], v[:, keys]

    @jax.checkpoint
    def one(first, q, segments, order):
        mask = visible(case, replace(tokens, segments_BT=segments, order_BT=order), slice(0, block), keys, first)
        return attend(q, k, v, mask, case)

    def split(x):  # [batch, size, ...] to [count, batch, block, ...]
        if x is None:
            return None
        x = jnp.pad(x[:, rows], ((0, 0), (0, count * block - size)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    firsts = rows.start + block * jnp.arange(count, dtype=jnp.int32)
    parts = (firsts, split(q), split(tokens.segments_BT), split(tokens.order_BT))
    if count == 1:
        return one(rows.start, *(None if x is None else x[0] for x in parts[1:]))
    _, out = lax.scan(lambda _, xs: (None, one(*xs)), None, parts)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], count * block, *out.shape[3:])[:, :size]
