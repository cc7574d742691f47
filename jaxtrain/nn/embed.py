"""Token embedding on a table sharded over its width, or as a head over vocabulary and width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxtrain.nn.env import Env, normal
from jaxtrain.sharding.rules import BATCH, SEQUENCE, TABLE, table_names
from jaxtrain.sharding.sharder import Dims, Sharder


class Embed(nnx.Module):
    """Looks rows up where they are stored and moves the rows, not the table.

    A shard of the table looks up all tokens of its group (of the axes that shard the table): zeros for ids it does not
    hold, and its part of the width. Rows are added up over the vocabulary's shards, straight into shards of the
    sequence where it has them, and all-to-alls over the width's shards hand every device its own rows in full width.
    All that travels is in the compute dtype, which for rows is exact: only one shard's is not zero.
    """

    def __init__(self, vocab: int, embed: int, *, tied: bool, std: float, env: Env, rngs: nnx.Rngs):
        self.env = env
        names = table_names(embed, tied, env.sharder.size(TABLE))
        self.table = env.param(rngs, names, (vocab, embed), normal(std))

    def __call__(self, tokens_BT: Array) -> Array:
        """int32 tokens [B, T], clipped to the vocabulary -> rows [B, T, D] in the compute dtype, on the residual
        stream's placement. Their gradient is added up in float32 on a shard, and over shards as other weights' is."""
        table, env = self.table.get_value(), self.env
        x_BTD: Any = _rows(
            _Lookup.make(env.sharder, self.table.names, table.shape, env.policy.compute), table, tokens_BT
        )
        return env.constrain(x_BTD, BATCH, SEQUENCE, None)


@dataclass(frozen=True)
class _Lookup:
    """Sharding of a table lookup. Tokens are viewed with a dim of its own for every mesh axis that splits them, so that
    the order of the axes in a dim does not matter to what moves over one of them.
    """

    sharder: Sharder
    shape: tuple[int, int]
    dtype: Any  # of the rows, and of what travels
    vocab: tuple[str, ...]  # mesh axes of the table's first dim
    width: tuple[str, ...]  # of its second
    kept: Dims  # of its gradient
    rows: tuple[str, ...]  # of the batch
    times: tuple[str, ...]  # of the sequence

    @classmethod
    def make(cls, sharder: Sharder, names: tuple[str, str], shape: tuple[int, ...], dtype: Any) -> _Lookup:
        sizes = {} if sharder.mesh is None else dict(sharder.mesh.shape)

        def real(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)

        vocab, width, rows, times = (real(sharder.axes(name)) for name in (*names, BATCH, SEQUENCE))
        kept = tuple(real(axes) for axes in sharder.stored(names, shape))
        return cls(sharder, (shape[0], shape[1]), jnp.dtype(dtype), vocab, width, kept, rows, times)

    @property
    def split(self) -> tuple[str | None, ...]:
        """Mesh axis of every dim of the viewed tokens."""
        return (*self.rows, None, *self.times, None)

    def size(self, *axes: str) -> int:
        return 1 if self.sharder.mesh is None else prod(self.sharder.mesh.shape[axis] for axis in axes)

    def view(self, x: Array) -> Array:
        """[B, T, ...] with the dims of `split`."""
        dims = [(x.shape[i], [self.size(axis) for axis in axes]) for i, axes in enumerate((self.rows, self.times))]
        return x.reshape(*(size for total, parts in dims for size in (*parts, total // prod(parts))), *x.shape[2:])

    def run(self, body: Callable, out: PartitionSpec, operand: Array, place: PartitionSpec, tokens: Array) -> Any:
        """`body(operand, tokens)` on every shard, with the tokens of its group."""
        tokens = self.view(tokens)
        if self.sharder.mesh is None:
            return body(operand, tokens)
        group = PartitionSpec(*(None if axis in (*self.vocab, *self.width) else axis for axis in self.split))
        return self.sharder.map(body, (place, group), out)(operand, tokens)

    def ids(self, tokens: Array) -> Array:
        """Rows of a shard's part of the table; one past its end for tokens that another shard holds."""
        ids = jnp.clip(tokens, 0, self.shape[0] - 1)
        if not self.vocab:
            return ids
        part = self.shape[0] // self.size(*self.vocab)
        ids -= part * lax.axis_index(self.vocab)
        return jnp.where((ids >= 0) & (ids < part), ids, part)

    def take(self, table: Array, tokens: Array) -> Array:
        """A shard's own rows in full width."""
        x = jnp.take(table, self.ids(tokens), axis=0, mode="fill", fill_value=0).astype(self.dtype)
        last = x.ndim - 1
        for axis in self.vocab:
            own = self.split.index(axis) if axis in self.split else None
            x = lax.psum(x, axis) if own is None else lax.psum_scatter(x, axis, scatter_dimension=own, tiled=True)
        for axis in reversed(self.width):  # the last lies innermost
            if axis in self.split:
                x = lax.all_to_all(x, axis, self.split.index(axis), last, tiled=True)
            else:
                x = lax.all_gather(x, axis, axis=last, tiled=True)
        return x

    def add(self, g: Array, tokens: Array) -> Array:
        """The transpose of `take`: a shard of the gradient, reduced over whatever splits the tokens."""
        last = g.ndim - 1
        for axis in self.width:
            if axis in self.split:
                g = lax.all_to_all(g, axis, last, self.split.index(axis), tiled=True)
            else:
                part = g.shape[last] // self.size(axis)
                g = lax.dynamic_slice_in_dim(g, part * lax.axis_index(axis), part, last)
        for axis in self.vocab:
            if axis in self.split:
                g = lax.all_gather(g, axis, axis=self.split.index(axis), tiled=True)
        # In float32, because a frequent token adds up thousands of rows.
        zeros = jnp.zeros((self.shape[0] // self.size(*self.vocab), g.shape[last]), jnp.float32)
        return self.reduced(zeros.at[self.ids(tokens)].add(g.astype(jnp.float32), mode="drop"))

    def reduced(self, table: Array) -> Array:
        """A gradient summed over the axes that split the tokens, into the shards of the train state."""
        axes = [axis for axis in self.split if axis and axis not in (*self.vocab, *self.width)]
        table = table.astype(self.dtype) if axes else table
        for dim, kept in enumerate(self.kept):
            for axis in kept:
                if axis in axes:
                    table = lax.psum_scatter(table, axis, scatter_dimension=dim, tiled=True)
                    axes.remove(axis)
        table = lax.psum(table, tuple(axes)) if axes else table
        # XLA for TPU fails an internal check where it moves this sum out of a loop over microbatches that adds it up.
        return lax.optimization_barrier(table)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(lookup: _Lookup, table: Array, tokens_BT: Array) -> Array:
    """Rows [B, T, D] of a table in the compute dtype."""
    with jax.named_scope("embed"):
        own = PartitionSpec(*lookup.split, None)
        x = lookup.run(lookup.take, own, table, PartitionSpec(lookup.vocab, lookup.width), tokens_BT)
        return x.reshape(*tokens_BT.shape, lookup.shape[1])


def _rows_fwd(lookup: _Lookup, table: Array, tokens_BT: Array):
    # An empty array carries the dtype of the gradient.
    return _rows(lookup, table, tokens_BT), (jnp.zeros((0,), table.dtype), tokens_BT)


def _rows_bwd(lookup: _Lookup, saved: tuple[Array, Array], g_BTD: Array):
    like, tokens_BT = saved
    with jax.named_scope("embed"):
        own = PartitionSpec(*lookup.split, None)
        gradient = lookup.run(lookup.add, PartitionSpec(*lookup.kept), lookup.view(g_BTD), own, tokens_BT)
        return gradient.astype(like.dtype), None


_rows.defvjp(_rows_fwd, _rows_bwd)
