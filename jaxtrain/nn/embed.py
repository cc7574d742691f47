"""Token embedding, on a table sharded over its width, or over vocabulary and width if it is the head too."""

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
    """Looks rows up where they are stored, and sends rows instead of the table.

    A shard of the table looks up all tokens of its group (over the axes that shard the table): its part of the width,
    and zeros for ids that it does not hold. Rows are summed over the shards of the vocabulary, straight into shards of
    the sequence if there are any. All-to-alls over the shards of the width then give every device its rows in full.
    All that is sent is in the compute dtype, which is exact for rows: only one shard has values other than zero.
    """

    def __init__(self, vocab: int, embed: int, *, tied: bool, std: float, env: Env, rngs: nnx.Rngs):
        self.env = env
        names = table_names(embed, tied, env.sharder.size(TABLE))
        self.table = env.param(rngs, names, (vocab, embed), normal(std))

    def __call__(self, tokens_BT: Array) -> Array:
        """Returns rows [B, T, D] in the compute dtype, sharded as the residual stream, for int32 tokens [B, T].

        Tokens are clipped to the vocabulary. The gradient of the table is summed in float32 on a shard, and over shards
        in the compute dtype, as for other weights.
        """
        table, env = self.table.get_value(), self.env
        x_BTD: Any = _rows(
            _Lookup.make(env.sharder, self.table.names, table.shape, env.policy.compute), table, tokens_BT
        )
        return env.constrain(x_BTD, BATCH, SEQUENCE, None)


@dataclass(frozen=True)
class _Lookup:
    """Sharding of a table lookup.

    Tokens are viewed with one dim for every mesh axis that splits them, so that collectives over one axis do not depend
    on the order of the axes in a dim.
    """

    sharder: Sharder
    shape: tuple[int, int]
    dtype: Any  # of the rows, also while they are sent
    vocab: tuple[str, ...]  # mesh axes of the table's rows
    width: tuple[str, ...]  # mesh axes of its width
    stored: Dims  # mesh axes of its gradient
    batch: tuple[str, ...]  # mesh axes of the batch
    sequence: tuple[str, ...]  # mesh axes of the sequence

    @classmethod
    def make(cls, sharder: Sharder, names: tuple[str, str], shape: tuple[int, ...], dtype: Any) -> _Lookup:
        sizes = {} if sharder.mesh is None else dict(sharder.mesh.shape)

        def used(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)

        vocab, width, batch, sequence = (used(sharder.axes(name)) for name in (*names, BATCH, SEQUENCE))
        stored = tuple(used(axes) for axes in sharder.storage_dims(names, shape))
        return cls(sharder, (shape[0], shape[1]), jnp.dtype(dtype), vocab, width, stored, batch, sequence)

    @property
    def split(self) -> tuple[str | None, ...]:
        """Mesh axis of every dim of the viewed tokens."""
        return (*self.batch, None, *self.sequence, None)

    def size(self, *axes: str) -> int:
        return 1 if self.sharder.mesh is None else prod(self.sharder.mesh.shape[axis] for axis in axes)

    def view(self, x: Array) -> Array:
        """Reshapes [B, T, ...] to the dims of `split`."""
        dims = [(x.shape[i], [self.size(axis) for axis in axes]) for i, axes in enumerate((self.batch, self.sequence))]
        return x.reshape(*(size for total, parts in dims for size in (*parts, total // prod(parts))), *x.shape[2:])

    def run(self, body: Callable, out: PartitionSpec, operand: Array, spec: PartitionSpec, tokens: Array) -> Any:
        """Runs `body(operand, tokens)` on every shard, with the tokens of its group."""
        tokens = self.view(tokens)
        if self.sharder.mesh is None:
            return body(operand, tokens)
        group = PartitionSpec(*(None if axis in (*self.vocab, *self.width) else axis for axis in self.split))
        return self.sharder.shard_map(body, (spec, group), out)(operand, tokens)

    def ids(self, tokens: Array) -> Array:
        """Returns row indices in a shard's part of the table; one past its end for tokens that it does not hold."""
        ids = jnp.clip(tokens, 0, self.shape[0] - 1)
        if not self.vocab:
            return ids
        part = self.shape[0] // self.size(*self.vocab)
        ids -= part * lax.axis_index(self.vocab)
        return jnp.where((ids >= 0) & (ids < part), ids, part)

    def take(self, table: Array, tokens: Array) -> Array:
        """Returns a shard's own rows in full width."""
        x = jnp.take(table, self.ids(tokens), axis=0, mode="fill", fill_value=0).astype(self.dtype)
        last = x.ndim - 1
        for axis in self.vocab:
            dim = self.split.index(axis) if axis in self.split else None
            x = lax.psum(x, axis) if dim is None else lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        for axis in reversed(self.width):  # the last axis is the innermost
            if axis in self.split:
                x = lax.all_to_all(x, axis, self.split.index(axis), last, tiled=True)
            else:
                x = lax.all_gather(x, axis, axis=last, tiled=True)
        return x

    def add(self, g: Array, tokens: Array) -> Array:
        """Returns a shard of the table's gradient, reduced over the axes that split the tokens: transpose of `take`."""
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
        # In float32, because a frequent token sums thousands of rows.
        zeros = jnp.zeros((self.shape[0] // self.size(*self.vocab), g.shape[last]), jnp.float32)
        return self._reduce(zeros.at[self.ids(tokens)].add(g.astype(jnp.float32), mode="drop"))

    def _reduce(self, table: Array) -> Array:
        """Sums a gradient over the axes that split the tokens, into the shards of the train state."""
        axes = [axis for axis in self.split if axis and axis not in (*self.vocab, *self.width)]
        table = table.astype(self.dtype) if axes else table
        for dim, stored in enumerate(self.stored):
            for axis in stored:
                if axis in axes:
                    table = lax.psum_scatter(table, axis, scatter_dimension=dim, tiled=True)
                    axes.remove(axis)
        table = lax.psum(table, tuple(axes)) if axes else table
        # XLA for TPU fails an internal check if it moves this sum out of the loop that accumulates microbatches.
        return lax.optimization_barrier(table)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(lookup: _Lookup, table: Array, tokens_BT: Array) -> Array:
    """Returns rows [B, T, D] of a table in the compute dtype."""
    with jax.named_scope("embed"):
        spec = PartitionSpec(*lookup.split, None)
        x = lookup.run(lookup.take, spec, table, PartitionSpec(lookup.vocab, lookup.width), tokens_BT)
        return x.reshape(*tokens_BT.shape, lookup.shape[1])


def _rows_fwd(lookup: _Lookup, table: Array, tokens_BT: Array):
    # An empty array carries the dtype of the gradient.
    return _rows(lookup, table, tokens_BT), (jnp.zeros((0,), table.dtype), tokens_BT)


def _rows_bwd(lookup: _Lookup, saved: tuple[Array, Array], g_BTD: Array):
    like, tokens_BT = saved
    with jax.named_scope("embed"):
        spec = PartitionSpec(*lookup.split, None)
        gradient = lookup.run(lookup.add, PartitionSpec(*lookup.stored), lookup.view(g_BTD), spec, tokens_BT)
        return gradient.astype(like.dtype), None


_rows.defvjp(_rows_fwd, _rows_bwd)
