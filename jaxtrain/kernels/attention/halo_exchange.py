"""Halo exchange for a short sliding window over a sharded sequence: only the tokens just before a chunk are sent.

Runs inside a `jax.shard_map` in which every mesh axis is manual; autodiff from outside is correct.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

Run = Callable[[Array, Array, Array, Array | None], Array]  # self-attention in array order: q, k, v, segments

TILE = 128  # the halo is rounded up to whole tiles of the kernels


def halo_size(window: int, chunk: int) -> int:
    """Returns the number of tokens that a chunk needs from the preceding one, at most all of them."""
    return min(chunk, -(-(window - 1) // TILE) * TILE)


def attention(
    run: Run, q: Array, k: Array, v: Array, segments_BT: Array | None, axes: tuple[str, ...], window: int, zigzag: bool
) -> Array:
    """Computes causal attention [batch, time, heads, head_dim] of a shard's tokens, for a window of at most chunk + 1.

    Each chunk becomes a row: the tokens that precede it, then its tokens. So the kernel sees tokens in their natural
    order. The preceding tokens have zero queries, whose outputs are dropped.

    Args:
        run: the kernel.
        q: queries of the shard.
        k: keys of the shard.
        v: values of the shard.
        segments_BT: documents of the whole row, in the order of its shards, or None.
        axes: mesh axes of the shards.
        window: tokens visible on the left, including the token itself.
        zigzag: rows are in zig-zag order, two chunks per shard; else in natural order, one chunk per shard.
    """
    parts, size = (2 if zigzag else 1), q.shape[1]
    chunk = size // parts
    before = halo_size(window, chunk)

    def with_halo(x: Array) -> Array:
        """Prepends to each chunk the end of the chunk that precedes it: [parts * batch, before + chunk, ...]."""
        chunks = jnp.split(x, parts, axis=1)
        ends = _preceding([c[:, chunk - before :] for c in chunks], axes)
        return jnp.concatenate([jnp.concatenate(pair, axis=1) for pair in zip(ends, chunks)], axis=0)

    me = lax.axis_index(axes)
    if segments_BT is None:
        segments_BT = jnp.ones((q.shape[0], size * lax.axis_size(axes)), jnp.int32)
    segments = jnp.concatenate(_documents(segments_BT, me, size, chunk, before), axis=0)
    queries = jnp.concatenate(jnp.split(q, parts, axis=1), axis=0)
    queries = jnp.pad(queries, ((0, 0), (before, 0), (0, 0), (0, 0)))
    out = run(queries, with_halo(k), with_halo(v), segments)[:, before:]
    return jnp.concatenate(jnp.split(out, parts, axis=0), axis=1)


def _preceding(ends: list[Array], axes: tuple[str, ...]) -> list[Array]:
    """Returns the end of the preceding chunk of the row for each chunk of a shard; zeros for the first."""
    count = lax.axis_size(axes)
    first = lax.ppermute(ends[0], axes, [(i, i + 1) for i in range(count - 1)])
    if len(ends) == 1:
        return [first]
    # Late chunks are in reverse order: the preceding one is on the next shard; on the last shard it is the early one.
    second = lax.ppermute(ends[1], axes, [(i + 1, i) for i in range(count - 1)])
    return [first, jnp.where(lax.axis_index(axes) == count - 1, ends[0], second)]


def _documents(segments_BT: Array, me: Array, size: int, chunk: int, before: int) -> list[Array]:
    """Returns the documents [batch, before + chunk] of each chunk with its halo; 0 where there are no tokens."""
    count = segments_BT.shape[1] // size

    def cut(start: Array, length: int) -> Array:
        return lax.dynamic_slice_in_dim(segments_BT, start, length, axis=1)

    def row(previous: Array, start: Array) -> Array:
        """Returns the halo from the chunk that starts at `previous`, and the chunk; clamped slices are never used."""
        return jnp.concatenate([cut(previous + chunk - before, before), cut(start, chunk)], axis=1)

    first = row((me - 1) * size, me * size)
    first = jnp.where((me == 0) & (jnp.arange(before + chunk) < before), 0, first)
    if chunk == size:
        return [first]
    previous = jnp.where(me == count - 1, me * size, (me + 1) * size + chunk)
    return [first, row(previous, me * size + chunk)]
