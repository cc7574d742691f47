"""Placement of host rows in device batches: each process reads only the rows its devices hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.config.schema import Config
from jaxtrain.core.program import Program
from jaxtrain.errors import UserError
from jaxtrain.sharding.context_parallel import has_tokens, zigzag
from jaxtrain.sharding.rules import BATCH, CONTEXT
from jaxtrain.sharding.sharder import Sharder

Fetch = Callable[[int, Any], Mapping[str, np.ndarray]]  # (step, rows) -> arrays with a leading dim of rows


def batch_sharding(sharder: Sharder, ndim: int, sequence: bool) -> jax.sharding.NamedSharding:
    """Rows over the batch axes; the second dim of a token batch over the context axes."""
    names = (BATCH, CONTEXT if sequence else None, *(None,) * (ndim - 2))
    return sharder.sharding(names[:ndim])


class Placer:
    """Turns `fetch(step, rows)` into global device arrays."""

    def __init__(
        self, fetch: Fetch, sharder: Sharder, global_batch: int, sequence: bool, order: np.ndarray | None = None
    ):
        """`sequence`: the second dim is of tokens. `order`: index of the token at each place of a device row."""
        self._fetch, self._sharder, self._rows, self._sequence = fetch, sharder, global_batch, sequence
        self._order = order
        spans = batch_sharding(sharder, 1, False).addressable_devices_indices_map((global_batch,)).values()
        mine = {row for index in spans if index for row in range(*index[0].indices(global_batch))}
        self.local = np.array(sorted(mine))
        self._position = np.full(global_batch, -1)
        self._position[self.local] = np.arange(len(self.local))

    def __call__(self, step: int) -> dict[str, jax.Array]:
        """The device batch of a step: arrays of `global_batch` rows."""
        everything = len(self.local) == self._rows
        host = self._fetch(step, slice(None) if everything else self.local)
        return {name: self._place(np.asarray(rows)) for name, rows in host.items()}

    def _place(self, rows: np.ndarray) -> jax.Array:
        sharding = batch_sharding(self._sharder, rows.ndim, self._sequence)
        if rows.shape[0] != len(self.local):
            raise UserError(f"the data gave {rows.shape[0]} rows where {len(self.local)} were asked for")
        if self._order is not None and rows.ndim > 1:
            if rows.shape[1] != len(self._order):
                raise UserError(f"data.sequence: {len(self._order)} tokens a row, but the data gave {rows.shape[1]}")
            rows = rows[:, self._order]
        if sharding.is_fully_addressable:
            return jax.device_put(rows, sharding)
        # Elsewhere device_put compares the rows of all processes, with a collective that this thread would issue beside
        # those of the step: each process waits for the other in another one.

        def shard(index: Any) -> np.ndarray:
            local = self._position[index[0]]
            return rows[(slice(local[0], local[-1] + 1), *index[1:])]

        return jax.make_array_from_callback((self._rows, *rows.shape[1:]), sharding, shard)


def placer(split: Any, program: Program) -> Placer:
    """Device batches of a dataset."""
    config, sharder = program.config, program.sharder
    is_tokens = has_tokens(config)
    order = row_order(config, sharder) if is_tokens else None
    return Placer(split.batch, sharder, config.data.global_batch, is_tokens, order)


def row_order(config: Config, sharder: Sharder) -> np.ndarray | None:
    """Order of the tokens of a device row, where it is not the natural one.

    It is put on here, once, to everything that has a place in the row. On the device order is read from `positions` and
    `segments` alone.
    """
    shards = sharder.size(CONTEXT)
    return zigzag(config.data.sequence, shards) if config.context_parallel == "ring" and shards > 1 else None
