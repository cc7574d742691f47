"""Ring attention over rows in zig-zag order: keys and values travel, every shard meets all of them in turn.

Ring attention is of Liu et al. 2023, arXiv:2310.01889. A shard holds an early and a late chunk of the row (see
`jaxtrain.mesh.context.zigzag`), so that with causal attention every meeting of two shards is two whole chunk-by-chunk
blocks: equal work everywhere and no branch. The next keys are on their way while a block is computed.

The derivative is written out, because the blocks' softmax must be that over all keys, and because autodiff would keep
the keys of every hop. In the backward pass keys and values go round again and their gradients travel with them.
Everything here runs inside a `jax.shard_map` in which every mesh axis is manual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.block import Cotangent, Keys, Partial, Queries, backward, forward, merge
from jaxtrain.kernels.attention.case import MASKED, Case

T = TypeVar("T")
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Ring:
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

        def cut(x: Array | None) -> Array | None:
            return None if x is None else lax.dynamic_slice_in_dim(x, shard * size, size, axis=1)

        return cut(self.order_BT), cut(self.segments_BT)  # type: ignore[return-value]

    def rotate(self, tree: T) -> T:
        """From every shard to the next one."""
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

        def step(state: tuple[Any, Any], distance: Array) -> tuple[tuple[Any, Any], None]:
            carry, kv = state
            coming = self.rotate(kv)
            return (meet(carry, kv, distance), coming), None

        coming = self.rotate((k, v))
        carry = own(Keys(k, v, *self.tokens(me)))
        if size > 2:
            (carry, coming), _ = lax.scan(step, (carry, coming), jnp.arange(1, size - 1))
        return meet(carry, coming, size - 1)


def ring_forward(ring: Ring, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
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
    ring: Ring, q: Array, k: Array, v: Array, out: Array, lse: Array, g: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v from the cotangent `g` of the output, in their dtypes; added up in float32."""
    case, block = ring.case, ring.block
    mine = Queries(q, *ring.tokens(lax.axis_index(ring.axes)))
    delta = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1)
    mine = (mine, Cotangent(g, lse, delta))
    early, late = _early(mine), _late(mine)

    def meet(case: Case, queries: Any, keys: Keys) -> tuple[Array, Array, Array]:
        return backward(case, queries[0], keys, queries[1], block)

    def own(keys: Keys) -> tuple[Array, Array, Array]:
        low, high = _early(keys), _late(keys)
        a, b, c = meet(case, early, low), meet(ring.seen, late, low), meet(case, late, high)
        return _both(a[0], b[0] + c[0]), _both(a[1] + b[1], c[1]), _both(a[2] + b[2], c[2])

    def hop(carry: tuple[Array, Array, Array], keys: Keys, earlier: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = carry
        dk, dv = ring.rotate((dk, dv))  # so that they stay with their keys
        low, high = _early(keys), _late(keys)
        a = meet(ring.seen, late, low)
        b = meet(ring.seen, _where(earlier, early, late), _where(earlier, low, high))
        in_early, in_late = ([jnp.where(earlier == is_early, x, 0.0) for x in b] for is_early in (True, False))
        return (
            dq + _both(in_early[0], a[0] + in_late[0]),
            dk + _both(a[1] + in_early[1], in_late[1]),
            dv + _both(a[2] + in_early[2], in_late[2]),
        )

    dq, dk, dv = ring.sweep(own, hop, k, v)
    dk, dv = ring.rotate((dk, dv))  # the last hop brings them home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


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
