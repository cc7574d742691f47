"""Attention over a sharded sequence (the logical name `context`), by three methods.

`ulysses` gives every shard whole sequences of some heads by all-to-alls (Jacobs et al. 2023, arXiv:2309.14509), so that
the fast kernels can be used: the least traffic, for at most as many shards as heads. `ring` rotates keys and values
(see `ring.py`), for any number of shards and the longest sequences; rows must be in zig-zag order. `gather` gives every
shard all keys and values: for few key/value heads, or heads that the shards do not divide.
Under `ring` and `gather` a window of at most a chunk and a token needs only the end of the neighbouring chunk (see
`halo_exchange.py`).

All bodies run in `jax.shard_map` over every mesh axis, because kernels can not be partitioned, and with
check_vma=False, because kernels do not declare what varies; so nothing is differentiated inside.
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
from jaxtrain.kernels.attention.spec import RESIDUALS, AttnSpec, TokenOrder
from jaxtrain.sharding.context_parallel import ANY_KERNEL
from jaxtrain.sharding.rules import BATCH, CONTEXT
from jaxtrain.sharding.sharder import Sharder

METHODS = ("gather", "ulysses", "ring")
MAX_SCORES = 2**22  # scores of a head that `gather` has at a time: blocks have fewer queries for longer rows
MIN_QUERIES = 32  # of a block, for the matrix units
Local = Callable[[Any, Any], halo_exchange.Run]  # q and k of one shard -> the kernel for their shapes


@dataclass(frozen=True, eq=False)
class Shards:
    """Sharding of queries and keys, as PartitionSpecs of their four dims, and the mesh axes of the sequence."""

    sharder: Sharder
    queries: PartitionSpec
    keys: PartitionSpec
    axes: tuple[str, ...]

    @property
    def rows(self) -> PartitionSpec:
        """PartitionSpec of [batch, tokens], replicated over the shards of a sequence."""
        return self.sharder.spec((BATCH, None))

    @property
    def count(self) -> int:
        """Number of shards of a sequence."""
        return self.sharder.size(CONTEXT)

    def run(self, body: Callable, in_specs: Any, out_specs: Any, *args: Any) -> Any:
        """Runs `body` on the shards."""
        return self.sharder.shard_map(body, in_specs, out_specs)(*args)


def choose_method(method: str, heads: int, shards: int) -> str:
    """Returns the method for the heads of a device: `auto` is ulysses if the shards divide them, else gather.

    Ulysses sends (2 heads + 2 kv_heads) / shards of a sequence, uses the fast kernels and balances the work; key/value
    heads are repeated as often as needed. `auto` is never the ring, which needs permuted rows.

    Raises:
        ValueError: unknown method, or heads that ulysses can not divide.
    """
    if method not in (*METHODS, "auto"):
        raise UserError(f"attention: no context parallel method `{method}`; expected auto, {', '.join(METHODS)}")
    if method == "auto":
        return "gather" if heads % shards else "ulysses"
    if method == "ulysses" and heads % shards:
        raise UserError(f"attention: ulysses cannot split {heads} heads over {shards} shards; ring and gather can")
    return method


def attention(
    q_BTHD: Array,
    k_BTKD: Array,
    v_BTKD: Array,
    options: AttnSpec,
    tokens: TokenOrder,
    *,
    method: str,
    kernel: str,
    local: Local,
    block: int,
    shards: Shards,
) -> Array:
    """Computes self-attention [batch, time, heads, head_dim] of sharded sequences.

    Args:
        q_BTHD: queries.
        k_BTKD: keys.
        v_BTKD: values.
        options: mask, softcap and scale.
        tokens: `segments_BT` of the row, and for the ring `order_BT`.
        method: see `choose_method`.
        kernel: configured kernel; ring and gather support only that of XLA.
        local: returns the kernel for the shapes of one shard.
        block: queries per block of the XLA kernel.
        shards: sharding of queries and keys.

    Raises:
        ValueError: the method does not support the options.
    """
    method = choose_method(method, q_BTHD.shape[2] // shards.sharder.size("heads"), shards.count)
    chunk, rest = divmod(q_BTHD.shape[1], shards.count * (2 if method == "ring" else 1))
    window = options.static_window
    if rest:
        raise UserError(f"attention: {q_BTHD.shape[1]} tokens do not divide over {shards.count} shards under {method}")
    if method == "ring" and not options.causal:
        raise UserError("attention: ring supports only causal attention; expected gather or ulysses")
    with jax.named_scope(f"attention_{method}"):
        if method == "ulysses":
            body = partial(_ulysses, axes=shards.axes, local=local)
        elif options.causal and window is not None and window <= chunk + 1 and not shards.sharder.in_pipeline_stage:
            body = partial(_halo, axes=shards.axes, local=local, window=window, zigzag=method == "ring")
        elif kernel not in ANY_KERNEL:
            expected = " or ".join(ANY_KERNEL)
            raise UserError(f"attention: `{kernel}` does not support sequence shards of {method}; expected {expected}")
        elif method == "ring":
            return _on_ring(shards, options, block, q_BTHD, k_BTKD, v_BTKD, tokens)
        else:
            return _gathered(shards, options, block, q_BTHD, k_BTKD, v_BTKD, tokens.segments_BT)
        rows = None if tokens.segments_BT is None else shards.rows
        specs = (shards.queries, shards.keys, shards.keys, rows)
        return shards.run(body, specs, shards.queries, q_BTHD, k_BTKD, v_BTKD, tokens.segments_BT)


def _ulysses(q: Array, k: Array, v: Array, segments_BT: Array | None, axes: tuple[str, ...], local: Local) -> Array:
    """Computes attention of all tokens of some heads instead of some tokens of all heads (DeepSpeed-Ulysses)."""
    count, kv_heads = lax.axis_size(axes), k.shape[2]
    repeats = count // gcd(kv_heads, count)

    def to_heads(x: Array) -> Array:
        return lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)

    q, k, v = to_heads(q), *(to_heads(jnp.repeat(x, repeats, axis=2) if repeats > 1 else x) for x in (k, v))
    out = local(q, k)(q, k, v, segments_BT)
    return lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)


def _halo(q, k, v, segments_BT, axes: tuple[str, ...], local: Local, window: int, zigzag: bool) -> Array:
    def run(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        return local(q, k)(q, k, v, segments)

    return halo_exchange.attention(run, q, k, v, segments_BT, axes, window, zigzag)


def _gathered(
    shards: Shards, options: AttnSpec, block: int, q: Array, k: Array, v: Array, segments_BT: Array | None
) -> Array:
    """Gathers keys and values of the whole row on every shard."""
    block = min(block, max(MIN_QUERIES, MAX_SCORES // q.shape[1]))

    def body(q: Array, k: Array, v: Array, segments_BT: Array | None, window: Array | None) -> Array:
        k, v = (lax.all_gather(x, shards.axes, axis=1, tiled=True) for x in (k, v))
        size = q.shape[1]
        start = lax.axis_index(shards.axes) * size
        segments = None if segments_BT is None else lax.dynamic_slice_in_dim(segments_BT, start, size, axis=1)
        order = start + jnp.arange(size, dtype=jnp.int32)
        tokens = TokenOrder(segments, segments_BT, order[None], jnp.arange(k.shape[1], dtype=jnp.int32)[None])
        return xla.attention(q, k, v, options if window is None else replace(options, window=window), tokens, block)

    rows = None if segments_BT is None else shards.rows
    specs = (shards.queries, shards.keys, shards.keys, rows, None if options.traced_window is None else PartitionSpec())
    out = shards.run(body, specs, shards.queries, q, k, v, segments_BT, options.traced_window)
    return checkpoint_name(out, RESIDUALS)


def _on_ring(shards: Shards, options: AttnSpec, block: int, q: Array, k: Array, v: Array, tokens: TokenOrder) -> Array:
    if tokens.order_BT is None:
        raise UserError("attention: ring needs positions_BT, as its rows are permuted")
    window = options.traced_window
    options = options if window is None else replace(options, window=None)
    return _ring(_RingSpec(shards, options, block), q, k, v, (tokens.order_BT, tokens.segments_BT, window))


@dataclass(frozen=True, eq=False)
class _RingSpec:
    """Static options of a ring. A traced window is an argument like the tokens."""

    shards: Shards
    options: AttnSpec
    block: int

    def ring(self, rows: tuple) -> RingShard:
        order_BT, segments_BT, window = rows
        options = self.options if window is None else replace(self.options, window=window)
        return RingShard(options, self.shards.axes, self.block, order_BT, segments_BT)

    def specs(self, rows: tuple) -> tuple:
        """Returns the PartitionSpecs of q, k, v and the rows."""
        _, segments_BT, window = rows
        spec = self.shards.rows
        tokens = (spec, None if segments_BT is None else spec, None if window is None else PartitionSpec())
        return self.shards.queries, self.shards.keys, self.shards.keys, tokens


def _dependent(rows: Any, q: Array) -> Any:
    """Returns `rows` with a dependency on `q`.

    When JAX differentiates a scan over layers, it moves values that are the same in every layer out of the loop. Masks
    depend on rows alone: without the dependency those of all blocks and hops, quadratic in the sequence, would exist at
    once.
    """
    return lax.optimization_barrier((rows, lax.stop_gradient(q)))[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(spec: _RingSpec, q: Array, k: Array, v: Array, rows: tuple) -> Array:
    return _ring_fwd(spec, q, k, v, rows)[0]


def _ring_fwd(spec: _RingSpec, q: Array, k: Array, v: Array, rows: tuple):
    queries = spec.shards.queries
    statistics = PartitionSpec(*queries[:3])
    body = lambda q, k, v, rows: ring_forward(spec.ring(_dependent(rows, q)), q, k, v)  # noqa: E731
    out, lse = spec.shards.run(body, spec.specs(rows), (queries, statistics), q, k, v, rows)
    out, lse = (checkpoint_name(x, RESIDUALS) for x in (out, lse))
    return out, (q, k, v, rows, out, lse)


def _ring_bwd(spec: _RingSpec, residuals: tuple, g: Array):
    q, k, v, rows, out, lse = residuals
    queries, keys, _, tokens = spec.specs(rows)
    specs = (queries, keys, keys, tokens, queries, PartitionSpec(*queries[:3]), queries)

    replicated = tuple(a for a in spec.shards.sharder.axes("heads") if a not in jax.tree.leaves(tuple(keys)))

    def body(q, k, v, rows, out, lse, g):
        dq, dk, dv = ring_backward(spec.ring(rows), q, k, v, out, lse, g)
        # If query heads are sharded and their one key head is not, the shards sum its gradient.
        return (dq, *lax.psum((dk, dv), replicated)) if replicated else (dq, dk, dv)

    return *spec.shards.run(body, specs, (queries, keys, keys), q, k, v, rows, out, lse, g), None


_ring.defvjp(_ring_fwd, _ring_bwd)
