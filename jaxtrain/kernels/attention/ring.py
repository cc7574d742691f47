"""Ring attention over rows in zig-zag order: keys and values travel, every shard meets all of them in turn.

Ring attention is of Liu et al. 2023, arXiv:2310.01889. A shard holds an early and a late chunk of the row (see
`jaxtrain.sharding.context_parallel.zigzag`), so that with causal attention every meeting of two shards is two whole
chunk-by-chunk blocks: equal work everywhere and no branch. The next keys are on their way while a block is computed.

The derivative is written out, because the blocks' softmax must be that over all keys, and because autodiff would keep
the keys of every hop. In the backward pass keys and values go round again and their gradients travel with them, all
but those by the shard's own queries: n - 1 hops for n shards, like all else that goes round.
Everything here runs inside a `jax.shard_map` in which every mesh axis is manual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.online_softmax import Cotangent, Keys, Partial, Queries, backward, forward, merge
from jaxtrain.kernels.attention.spec import MASKED, Case

T = TypeVar("T")
Axes = tuple[str, ...]


@dataclass(frozen=True)
class RingShard:
    """One shard of a ring: options, the axes it goes over, and order and documents of whole rows, as they lie.

    `order_BT` is int32 [batch, tokens of the row], `segments_BT` alike or None; both small, so every shard has them.
    """

    case: Case
    axes: Axes
    block: int
    order_BT: Array
    segments_BT: Array | None

    @property
    def size(self) -> int:
        """Shards of the ring."""
        return lax.axis_size(self.axes)

    @property
    def seen(self) -> Case:
        """The options between chunks one of which lies wholly before the other: no order to test."""
        return replace(self.case, causal=False)

    def tokens(self, shard: Array) -> tuple[Array, Array | None]:
        """Order and documents of a shard's tokens."""
        size = self.order_BT.shape[1] // self.size

        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, shard * size, size, axis=1)

        return cut(self.order_BT), None if self.segments_BT is None else cut(self.segments_BT)

    def rotate(self, tree: T) -> T:
        """Sends arrays from every shard to the next one."""
        hops = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, hops), tree)

    def sweep(self, own: Any, hop: Callable[[Any, Keys, Array], Any], k: Array, v: Array) -> Any:
        """`hop(carry, keys, earlier)` for the keys of all other shards, from the one before on.

        Args:
            own: called with the shard's own keys: the first carry.
            hop: `earlier` is whether the keys come from a shard of a lower index.
            k: the shard's own keys.
            v: the shard's own values.
        """
        me, size = lax.axis_index(self.axes), self.size

        def meet(carry: Any, kv: tuple[Array, Array], distance: Any) -> Any:
            source = (me - distance) % size
            return hop(carry, Keys(*kv, *self.tokens(source)), source < me)

        def step(state: tuple[Any, Any], distance: Any) -> tuple[tuple[Any, Any], None]:
            carry, kv = state
            coming = self.rotate(kv)
            return (meet(carry, kv, distance), coming), None

        coming = self.rotate((k, v))
        state = own(Keys(k, v, *self.tokens(me))), coming
        if size > 2:
            state, _ = step(state, 1)  # by itself: the first hop may change the structure of the carry
        if size > 3:
            state, _ = lax.scan(step, state, jnp.arange(2, size - 1))
        return meet(*state, size - 1)


def ring_forward(ring: RingShard, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Output [batch, time, heads, head_dim] in the dtype of `q`, and log-sum-exp float32 [batch, time, heads]."""
    case, block = ring.case, ring.block
    mine = Queries(q, *ring.tokens(lax.axis_index(ring.axes)))
    early, late = _early(mine), _late(mine)

    def own(keys: Keys) -> tuple[Partial, Partial]:
        low, high = _early(keys), _late(keys)
        ends = merge(forward(ring.seen, late, low, block), forward(case, late, high, block))
        return forward(case, early, low, block), ends

    def hop(carry: tuple[Partial, Partial], keys: Keys, earlier: Array) -> tuple[Partial, Partial]:
        low, high = _early(keys), _late(keys)
        first, second = carry
        second = merge(second, forward(ring.seen, late, low, block))
        # Of the other three pairs of chunks one is seen: early-early from an earlier shard, late-late from a later.
        part = forward(ring.seen, _where(earlier, early, late), _where(earlier, low, high), block)
        first = merge(first, part._replace(lse_BTH=jnp.where(earlier, part.lse_BTH, MASKED)))
        second = merge(second, part._replace(lse_BTH=jnp.where(earlier, MASKED, part.lse_BTH)))
        return first, second

    first, second = ring.sweep(own, hop, k, v)
    out, lse = (jnp.concatenate(halves, axis=1) for halves in zip(first, second))
    return out.astype(q.dtype), lse


def ring_backward(
    ring: RingShard, q: Array, k: Array, v: Array, out: Array, lse: Array, g: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v from the cotangent `g` of the output, in their dtypes; added up in float32."""
    case, block = ring.case, ring.block
    mine = Queries(q, *ring.tokens(lax.axis_index(ring.axes)))
    delta = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1)
    mine = (mine, Cotangent(g, lse, delta))
    early, late = _early(mine), _late(mine)

    def meet(case: Case, queries: Any, keys: Keys) -> tuple[Array, Array, Array]:
        return backward(case, queries[0], keys, queries[1], block)

    def own(keys: Keys) -> _Sums:
        low, high = _early(keys), _late(keys)
        a, b, c = meet(case, early, low), meet(ring.seen, late, low), meet(case, late, high)
        mine = tuple(_both(x + y, z) for x, y, z in zip(a[1:], b[1:], c[1:]))
        return _Sums(_both(a[0], b[0] + c[0]), mine, None)

    def hop(carry: _Sums, keys: Keys, earlier: Array) -> _Sums:
        # The sums stay with their keys. At the first hop there are none: keys leave home without their own.
        sums = None if carry.travelling is None else ring.rotate(carry.travelling)
        low, high = _early(keys), _late(keys)
        a = meet(ring.seen, late, low)
        b = meet(ring.seen, _where(earlier, early, late), _where(earlier, low, high))
        in_early, in_late = ([jnp.where(earlier == is_early, x, 0.0) for x in b] for is_early in (True, False))
        more = tuple(_both(a[i] + in_early[i], in_late[i]) for i in (1, 2))
        sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
        return carry._replace(dq=carry.dq + _both(in_early[0], a[0] + in_late[0]), travelling=sums)

    dq, mine, sums = ring.sweep(own, hop, k, v)
    dk, dv = jax.tree.map(jnp.add, mine, ring.rotate(sums))  # the last hop brings them home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


class _Sums(NamedTuple):
    """Float32 gradients on their way: of the shard's queries; of its own keys and values by its own queries; and of
    the keys and values that are here, by the queries that they met elsewhere (None before any).
    """

    dq: Array
    mine: tuple[Array, ...]
    travelling: tuple[Array, ...] | None


def _early(tree: T) -> T:
    """The first of the two chunks of a shard."""
    return jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)


def _late(tree: T) -> T:
    """The second of the two chunks of a shard."""
    return jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)


def _both(early: Array, late: Array) -> Array:
    return jnp.concatenate([early, late], axis=1)


def _where(condition: Array, a: T, b: T) -> T:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
