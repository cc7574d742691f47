"""Attention whose sequence lies in shards (the logical name `context`), in three formulations.

`ulysses` hands every shard whole sequences of some heads by all-to-alls (Jacobs et al. 2023, arXiv:2309.14509), so
that the fast kernels run as they are: the least traffic, for as many shards as there are heads. `ring` passes keys and
values round (see `ring.py`), for any number of shards and the longest sequences; rows must be in zig-zag order.
`gather` gives every shard all keys and values: for few key/value heads, or where heads do not divide.
Under `ring` and `gather` a window no longer than a chunk and a token needs its neighbour's end only (see `halo.py`).

All bodies run in `jax.shard_map` over every mesh axis, because kernels cannot be partitioned, and unchecked
(check_vma=False), because kernels do not say what varies; so nothing is differentiated inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import halo_exchange, xla
from jaxtrain.kernels.attention.ring import RingShard, ring_backward, ring_forward
from jaxtrain.kernels.attention.spec import RESIDUALS, Case, TokenOrder
from jaxtrain.sharding.context_parallel import ANY_KERNEL
from jaxtrain.sharding.rules import BATCH, CONTEXT
from jaxtrain.sharding.sharder import Sharder

FORMULATIONS = ("gather", "ulysses", "ring")
SCORES = 2**22  # of a head that `gather` has at a time: fewer queries meet longer rows
SMALLEST = 32  # queries, for the matrix units
Local = Callable[[Any, Any], halo_exchange.Run]  # (q, k) with the shapes of one shard -> the kernel for them


@dataclass(frozen=True, eq=False)
class Shards:
    """Sharding of queries and keys, as PartitionSpecs of their four dims, and the mesh axes of the context."""

    sharder: Sharder
    queries: PartitionSpec
    keys: PartitionSpec
    axes: tuple[str, ...]

    @property
    def rows(self) -> PartitionSpec:
        """PartitionSpec of [batch, tokens] with all tokens on every shard."""
        return self.sharder.spec((BATCH, None))

    @property
    def count(self) -> int:
        """Shards of a sequence."""
        return self.sharder.size(CONTEXT)

    def run(self, body: Callable, in_specs: Any, out_specs: Any, *args: Any) -> Any:
        """`body` on the shards."""
        return self.sharder.shard_map(body, in_specs, out_specs)(*args)


def choose(formulation: str, heads: int, shards: int) -> str:
    """The formulation for so many heads to a device: `auto` is ulysses where the heads divide, else gather.

    Ulysses sends (2 heads + 2 kv_heads) / shards of a sequence and keeps the fast kernels and equal work; key/value
    heads are repeated as far as they must. The ring needs rows permuted, so it is never chosen unasked.

    Raises:
        ValueError: there is no such formulation, or heads that ulysses can not divide.
    """
    if formulation not in (*FORMULATIONS, "auto"):
        raise UserError(f"attention: no formulation `{formulation}`; there are auto, {', '.join(FORMULATIONS)}")
    if formulation == "auto":
        return "gather" if heads % shards else "ulysses"
    if formulation == "ulysses" and heads % shards:
        raise UserError(f"attention: ulysses cannot split {heads} heads over {shards} shards; ring and gather can")
    return formulation


def attention(
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKD: Array,
    case: Case,
    tokens: TokenOrder,
    *,
    formulation: str,
    kernel: str,
    local: Local,
    block: int,
    shards: Shards,
) -> Array:
    """Self-attention [batch, time, heads, head_dim] of sequences in shards.

    Args:
        q_BTHD: queries; `k_BTKD` and `v_BTKD` alike.
        k_BTKD: keys.
        v_BTKD: values.
        case: the options.
        tokens: `segments_BT` of the row, and for the ring `order_BT`.
        formulation: see `choose`.
        kernel: what was asked for; ring and gather have no other than that of XLA.
        local: makes the kernel for the shapes of one shard.
        block: queries that scores exist for at a time, outside of such kernels.
        shards: where everything lies.

    Raises:
        ValueError: a formulation that can not do the case.
    """
    own = q_BTHD.shape[2] // shards.sharder.size("heads")
    formulation = choose(formulation, own, shards.count)
    if q_BTHD.shape[1] % (shards.count * (2 if formulation == "ring" else 1)):
        raise UserError(f"attention: {q_BTHD.shape[1]} tokens over {shards.count} shards under {formulation}")
    chunk = q_BTHD.shape[1] // shards.count // (2 if formulation == "ring" else 1)
    if formulation == "ring" and not case.causal:
        raise UserError("attention: the ring is causal; gather and ulysses can do without")
    with jax.named_scope(f"attention_{formulation}"):
        if formulation == "ulysses":
            body = partial(_ulysses, axes=shards.axes, local=local)
        elif case.causal and case.span is not None and case.span <= chunk + 1 and not shards.sharder.in_pipeline_stage:
            body = partial(_halo, axes=shards.axes, local=local, window=case.span, zigzag=formulation == "ring")
        elif kernel not in ANY_KERNEL:
            able = " or ".join(ANY_KERNEL)
            raise UserError(f"attention: `{kernel}` needs whole sequences, {formulation} keeps shards; give {able}")
        elif formulation == "ring":
            return _on_ring(shards, case, block, q_BTHD, k_BTKD, v_BTKD, tokens)
        else:
            return _gathered(shards, case, block, q_BTHD, k_BTKD, v_BTKD, tokens.segments_BT)
        rows = None if tokens.segments_BT is None else shards.rows
        specs = (shards.queries, shards.keys, shards.keys, rows)
        return shards.run(body, specs, shards.queries, q_BTHD, k_BTKD, v_BTKD, tokens.segments_BT)


def _ulysses(q: Array, k: Array, v: Array, segments_BT: Array | None, axes: tuple[str, ...], local: Local) -> Array:
    """Attends with all tokens of some heads instead of some tokens of all heads (DeepSpeed-Ulysses)."""
    count, kv_heads = lax.axis_size(axes), k.shape[2]
    repeats = count // gcd(kv_heads, count)

    def whole(x: Array) -> Array:
        return lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)

    q, k, v = whole(q), *(whole(jnp.repeat(x, repeats, axis=2) if repeats > 1 else x) for x in (k, v))
    out = local(q, k)(q, k, v, segments_BT)
    return lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)


def _halo(q, k, v, segments_BT, axes: tuple[str, ...], local: Local, window: int, zigzag: bool) -> Array:
    def run(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        return local(q, k)(q, k, v, segments)

    return halo_exchange.attention(run, q, k, v, segments_BT, axes, window, zigzag)


def _gathered(shards: Shards, case: Case, block: int, q: Array, k: Array, v: Array, segments_BT: Array | None) -> Array:
    """Queries stay; keys and values of the whole row come together."""
    window = case.window if case.span is None else None
    block = min(block, max(SMALLEST, SCORES // q.shape[1]))

    def body(q: Array, k: Array, v: Array, segments_BT: Array | None, window: Array | None) -> Array:
        k, v = (lax.all_gather(x, shards.axes, axis=1, tiled=True) for x in (k, v))
        size = q.shape[1]
        start = lax.axis_index(shards.axes) * size
        own = None if segments_BT is None else lax.dynamic_slice_in_dim(segments_BT, start, size, axis=1)
        order = start + jnp.arange(size, dtype=jnp.int32)
        tokens = TokenOrder(own, segments_BT, order[None], jnp.arange(k.shape[1], dtype=jnp.int32)[None])
        return xla.attention(q, k, v, case if window is None else replace(case, window=window), tokens, block)

    rows = None if segments_BT is None else shards.rows
    specs = (shards.queries, shards.keys, shards.keys, rows, None if window is None else PartitionSpec())
    out = shards.run(body, specs, shards.queries, q, k, v, segments_BT, window)
    return checkpoint_name(out, RESIDUALS)


def _on_ring(shards: Shards, case: Case, block: int, q: Array, k: Array, v: Array, tokens: TokenOrder) -> Array:
    if tokens.order_BT is None:
        raise UserError("attention: the ring needs positions_BT: its rows are permuted")
    window = case.window if case.span is None else None
    case = case if window is None else replace(case, window=None)
    return _ring(_RingSpec(shards, case, block), q, k, v, (tokens.order_BT, tokens.segments_BT, window))


@dataclass(frozen=True, eq=False)
class _RingSpec:
    """Static options of a ring. A window that is not known when tracing comes with the tokens."""

    shards: Shards
    case: Case
    block: int

    def ring(self, rows: tuple) -> RingShard:
        order_BT, segments_BT, window = rows
        case = self.case if window is None else replace(self.case, window=window)
        return RingShard(case, self.shards.axes, self.block, order_BT, segments_BT)

    def specs(self, rows: tuple) -> tuple:
        """PartitionSpecs of q, k, v and the rows."""
        _, segments_BT, window = rows
        whole = self.shards.rows
        tokens = (whole, None if segments_BT is None else whole, None if window is None else PartitionSpec())
        return self.shards.queries, self.shards.keys, self.shards.keys, tokens


def _tied(rows: Any, q: Array) -> Any:
    """`rows` as if they depended on `q`.

    Masks depend on nothing else, and when JAX differentiates a scan over layers it takes what is the same in every
    layer out of the loop: the masks of all blocks of all hops at once, quadratic in the sequence.
    """
    return lax.optimization_barrier((rows, lax.stop_gradient(q)))[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(plan: _RingSpec, q: Array, k: Array, v: Array, rows: tuple) -> Array:
    return _ring_fwd(plan, q, k, v, rows)[0]


def _ring_fwd(plan: _RingSpec, q: Array, k: Array, v: Array, rows: tuple):
    queries = plan.shards.queries
    statistics = PartitionSpec(*queries[:3])
    body = lambda q, k, v, rows: ring_forward(plan.ring(_tied(rows, q)), q, k, v)  # noqa: E731
    out, lse = plan.shards.run(body, plan.specs(rows), (queries, statistics), q, k, v, rows)
    out, lse = (checkpoint_name(x, RESIDUALS) for x in (out, lse))
    return out, (q, k, v, rows, out, lse)


def _ring_bwd(plan: _RingSpec, saved: tuple, g: Array):
    q, k, v, rows, out, lse = saved
    queries, keys, _, tokens = plan.specs(rows)
    specs = (queries, keys, keys, tokens, queries, PartitionSpec(*queries[:3]), queries)

    shared = tuple(a for a in plan.shards.sharder.axes("heads") if a not in jax.tree.leaves(tuple(keys)))

    def body(q, k, v, rows, out, lse, g):
        dq, dk, dv = ring_backward(plan.ring(rows), q, k, v, out, lse, g)
        # Where query heads lie in shards and their one key head does not, each shard has a part of its gradient.
        return (dq, *lax.psum((dk, dv), shared)) if shared else (dq, dk, dv)

    return *plan.shards.run(body, specs, (queries, keys, keys), q, k, v, rows, out, lse, g), None


_ring.defvjp(_ring_fwd, _ring_bwd)
