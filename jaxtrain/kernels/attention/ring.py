"""Ring attention over rows in zig-zag order: keys and values rotate through the shards (arXiv:2310.01889).

A shard holds an early and a late chunk of the row (see `jaxtrain.sharding.context_parallel.zigzag`), so that with
causal attention every pair of shards has two full chunk-by-chunk blocks: equal work everywhere and no branch. The next
keys are sent while a block is computed.

The derivative is custom, because the softmax of the blocks is over all keys, and because autodiff would save the keys
of every hop. In the backward pass keys and values rotate again, together with their gradients, except those from the
shard's own queries: n - 1 hops for n shards.
All functions run inside a `jax.shard_map` in which every mesh axis is manual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.online_softmax import (
    Cotangent,
    Keys,
    PartialAttention,
    Queries,
    backward,
    forward,
    merge,
)
from jaxtrain.kernels.attention.spec import MASKED, AttnSpec

T = TypeVar("T")
Halves = tuple[PartialAttention, PartialAttention]  # of the early and the late queries


@dataclass(frozen=True)
class RingShard:
    """One shard of a ring.

    Attributes:
        spec: attention options.
        axes: mesh axes of the ring.
        block: queries per block of scores.
        order_BT: int32 [batch, tokens of the row], in the order of the shards; replicated.
        segments_BT: documents, likewise, or None.
    """

    spec: AttnSpec
    axes: tuple[str, ...]
    block: int
    order_BT: Array
    segments_BT: Array | None

    @property
    def size(self) -> int:
        """Number of shards of the ring."""
        return lax.axis_size(self.axes)

    @property
    def not_causal(self) -> AttnSpec:
        """Options for chunks of which one precedes the other, so that causality is not tested."""
        return replace(self.spec, causal=False)

    def tokens(self, shard: Array) -> tuple[Array, Array | None]:
        """Returns order and documents of a shard's tokens."""
        size = self.order_BT.shape[1] // self.size

        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, shard * size, size, axis=1)

        return cut(self.order_BT), None if self.segments_BT is None else cut(self.segments_BT)

    def rotate(self, tree: T) -> T:
        """Sends arrays from every shard to the next one."""
        hops = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, hops), tree)

    def sweep(self, local: Any, hop: Callable[[Any, Keys, Array], Any], k: Array, v: Array) -> Any:
        """Calls `hop(carry, keys, is_earlier)` for the keys of all other shards, starting with the previous one.

        Args:
            local: called with the shard's own keys; returns the first carry.
            hop: `is_earlier` is whether the keys come from a shard of a lower index.
            k: the shard's own keys.
            v: the shard's own values.
        """
        me, size = lax.axis_index(self.axes), self.size

        def meet(carry: Any, kv: tuple[Array, Array], distance: Any) -> Any:
            source = (me - distance) % size
            return hop(carry, Keys(*kv, *self.tokens(source)), source < me)

        def step(state: tuple[Any, Any], distance: Any) -> tuple[tuple[Any, Any], None]:
            carry, kv = state
            next_kv = self.rotate(kv)
            return (meet(carry, kv, distance), next_kv), None

        next_kv = self.rotate((k, v))
        state = local(Keys(k, v, *self.tokens(me))), next_kv
        if size > 2:
            state, _ = step(state, 1)  # outside the scan, as the first hop may change the structure of the carry
        if size > 3:
            state, _ = lax.scan(step, state, jnp.arange(2, size - 1))
        return meet(*state, size - 1)


def ring_forward(ring: RingShard, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Returns the output in the dtype of `q`, and the float32 log-sum-exp [batch, time, heads]."""
    spec, block = ring.spec, ring.block
    queries = Queries(q, *ring.tokens(lax.axis_index(ring.axes)))
    early, late = _early(queries), _late(queries)

    def local(keys: Keys) -> Halves:
        low, high = _early(keys), _late(keys)
        ends = merge(forward(ring.not_causal, late, low, block), forward(spec, late, high, block))
        return forward(spec, early, low, block), ends

    def hop(carry: Halves, keys: Keys, is_earlier: Array) -> Halves:
        low, high = _early(keys), _late(keys)
        first, second = carry
        second = merge(second, forward(ring.not_causal, late, low, block))
        # Of the other three pairs of chunks one is visible: early-early if the shard is earlier, else late-late.
        part = forward(ring.not_causal, _where(is_earlier, early, late), _where(is_earlier, low, high), block)
        first = merge(first, part._replace(lse_BTH=jnp.where(is_earlier, part.lse_BTH, MASKED)))
        second = merge(second, part._replace(lse_BTH=jnp.where(is_earlier, MASKED, part.lse_BTH)))
        return first, second

    first, second = ring.sweep(local, hop, k, v)
    out, lse = (jnp.concatenate(halves, axis=1) for halves in zip(first, second))
    return out.astype(q.dtype), lse


def ring_backward(
    ring: RingShard, q: Array, k: Array, v: Array, out: Array, lse: Array, g: Array
) -> tuple[Array, Array, Array]:
    """Returns the gradients of q, k and v, in their dtypes, from the cotangent `g`. They accumulate in float32."""
    spec, block = ring.spec, ring.block
    delta = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1)
    queries = Queries(q, *ring.tokens(lax.axis_index(ring.axes))), Cotangent(g, lse, delta)
    early, late = _early(queries), _late(queries)

    def pair_grads(spec: AttnSpec, queries: Any, keys: Keys) -> tuple[Array, Array, Array]:
        return backward(spec, queries[0], keys, queries[1], block)

    def local(keys: Keys) -> _Sums:
        low, high = _early(keys), _late(keys)
        a, b, c = pair_grads(spec, early, low), pair_grads(ring.not_causal, late, low), pair_grads(spec, late, high)
        local_kv = tuple(_concatenate(x + y, z) for x, y, z in zip(a[1:], b[1:], c[1:]))
        return _Sums(_concatenate(a[0], b[0] + c[0]), local_kv, None)

    def hop(carry: _Sums, keys: Keys, is_earlier: Array) -> _Sums:
        # The gradients rotate with their keys, except those of the local queries: none at the first hop.
        sums = None if carry.rotating is None else ring.rotate(carry.rotating)
        low, high = _early(keys), _late(keys)
        a = pair_grads(ring.not_causal, late, low)
        b = pair_grads(ring.not_causal, _where(is_earlier, early, late), _where(is_earlier, low, high))
        in_early, in_late = ([jnp.where(is_earlier == is_early, x, 0.0) for x in b] for is_early in (True, False))
        kv_grads = tuple(_concatenate(a[i] + in_early[i], in_late[i]) for i in (1, 2))
        sums = kv_grads if sums is None else jax.tree.map(jnp.add, sums, kv_grads)
        return carry._replace(dq=carry.dq + _concatenate(in_early[0], a[0] + in_late[0]), rotating=sums)

    dq, local_kv, sums = ring.sweep(local, hop, k, v)
    dk, dv = jax.tree.map(jnp.add, local_kv, ring.rotate(sums))  # back to the shard of the keys
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


class _Sums(NamedTuple):
    """Float32 gradients during the backward pass.

    Attributes:
        dq: of the shard's queries.
        local_kv: of the shard's keys and values, from its own queries.
        rotating: of the keys and values that are on the shard, from the queries of earlier hops; None before the first.
    """

    dq: Array
    local_kv: tuple[Array, ...]
    rotating: tuple[Array, ...] | None


def _early(tree: T) -> T:
    """Returns the first of the two chunks of a shard."""
    return jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)


def _late(tree: T) -> T:
    """Returns the second of the two chunks of a shard."""
    return jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)


def _concatenate(early: Array, late: Array) -> Array:
    return jnp.concatenate([early, late], axis=1)


def _where(condition: Array, a: T, b: T) -> T:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
