"""Placement of host rows on devices: each process reads only the rows that its devices hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.core.program import Program
from jaxtrain.errors import UserError
from jaxtrain.models.spec import has_token_rows
from jaxtrain.sharding.context_parallel import zigzag
from jaxtrain.sharding.rules import BATCH, CONTEXT
from jaxtrain.sharding.sharder import Sharder

Fetch = Callable[[int, Any], Mapping[str, np.ndarray]]  # (step, rows) -> arrays with a leading dim of rows


def batch_sharding(sharder: Sharder, ndim: int, has_sequence: bool) -> jax.sharding.NamedSharding:
    """Shards rows over the batch axes, and the second dim of a token batch over the context axes."""
    names = (BATCH, CONTEXT if has_sequence else None, *(None,) * (ndim - 2))
    return sharder.sharding(names[:ndim])


class Placer:
    """Turns `fetch(step, rows)` into global device arrays."""

    def __init__(
        self, fetch: Fetch, sharder: Sharder, global_batch: int, has_sequence: bool, order: np.ndarray | None = None
    ):
        """Creates the placer.

        Args:
            fetch: reads the rows of a step.
            sharder: mesh and rules.
            global_batch: rows of a step.
            has_sequence: True if the second dim is of tokens.
            order: index of the token at each position of a device row; None: the natural order.
        """
        self._fetch, self._sharder, self._rows, self._has_sequence = fetch, sharder, global_batch, has_sequence
        self._order = order
        spans = batch_sharding(sharder, 1, False).addressable_devices_indices_map((global_batch,)).values()
        rows = {row for index in spans if index for row in range(*index[0].indices(global_batch))}
        self.local_rows = np.array(sorted(rows))
        self._position = np.full(global_batch, -1)
        self._position[self.local_rows] = np.arange(len(self.local_rows))

    def __call__(self, step: int) -> dict[str, jax.Array]:
        """Returns the device batch of a step: arrays of `global_batch` rows."""
        holds_all = len(self.local_rows) == self._rows
        host = self._fetch(step, slice(None) if holds_all else self.local_rows)
        return {name: self._place(np.asarray(rows)) for name, rows in host.items()}

    def _place(self, rows: np.ndarray) -> jax.Array:
        sharding = batch_sharding(self._sharder, rows.ndim, self._has_sequence)
        if rows.shape[0] != len(self.local_rows):
            raise UserError(f"data: expected {len(self.local_rows)} rows from `batch`; found {rows.shape[0]}")
        if self._order is not None and rows.ndim > 1:
            if rows.shape[1] != len(self._order):
                message = f"expected rows of {len(self._order)} tokens from the data; found {rows.shape[1]}"
                raise UserError(f"data.sequence: {message}")
            rows = rows[:, self._order]
        if sharding.is_fully_addressable:
            return jax.device_put(rows, sharding)
        # With several processes device_put compares the rows of all of them by a collective. This thread would issue
        # it among the collectives of the step, and processes would wait for each other in different ones.

        def shard(index: Any) -> np.ndarray:
            local = self._position[index[0]]
            return rows[(slice(local[0], local[-1] + 1), *index[1:])]

        return jax.make_array_from_callback((self._rows, *rows.shape[1:]), sharding, shard)


def placer(dataset: Any, program: Program) -> Placer:
    """Returns the placer of a dataset's batches."""
    config, sharder = program.config, program.sharder
    has_sequence = has_token_rows(config.model, config.data)
    order = row_order(config.context_parallel, config.data.sequence, sharder) if has_sequence else None
    return Placer(dataset.batch, sharder, config.data.global_batch, has_sequence, order)


def row_order(context_parallel: str, sequence: int, sharder: Sharder) -> np.ndarray | None:
    """Returns the order of the tokens of a device row; None if it is the natural one.

    The host permutes the rows once. Device code reads the order from `positions` and `segments` alone.
    """
    shards = sharder.size(CONTEXT)
    return zigzag(sequence, shards) if context_parallel == "ring" and shards > 1 else None
