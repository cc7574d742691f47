"""Placement of host rows on devices, and the rows that each process holds: it reads only these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from jaxtrain.config.schema import Config
from jaxtrain.core.program import Program
from jaxtrain.data.objects.shard import DataShard
from jaxtrain.errors import DataError, UserError, join_words
from jaxtrain.models.spec import has_token_rows, model_spec
from jaxtrain.sharding.context_parallel import zigzag
from jaxtrain.sharding.devices import make_mesh
from jaxtrain.sharding.layout import resolve_layout
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
        self._fetch, self._rows, self._order = fetch, global_batch, order
        spans = batch_sharding(sharder, 1, False).addressable_devices_indices_map((global_batch,)).values()
        rows = {row for index in spans if index for row in range(*index[0].indices(global_batch))}
        self.local_rows = np.array(sorted(rows))
        self._position = np.full(global_batch, -1)
        self._position[self.local_rows] = np.arange(len(self.local_rows))
        self._sharding = cache(lambda ndim: batch_sharding(sharder, ndim, has_sequence))

    @property
    def host_rows(self) -> slice | np.ndarray:
        """Rows of the global batch that this process reads."""
        return slice(None) if len(self.local_rows) == self._rows else self.local_rows

    def __call__(self, step: int) -> dict[str, jax.Array]:
        """Returns the device batch of a step: arrays of `global_batch` rows."""
        host = self._fetch(step, self.host_rows)
        rows = {name: self._ordered(np.asarray(values)) for name, values in host.items()}
        shardings = {name: self._sharding(values.ndim) for name, values in rows.items()}
        if all(sharding.is_fully_addressable for sharding in shardings.values()):
            return jax.device_put(rows, shardings)  # all arrays together: a call costs more than a small array
        return {name: self._place(values, shardings[name]) for name, values in rows.items()}

    def _ordered(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[0] != len(self.local_rows):
            raise UserError(f"data: expected {len(self.local_rows)} rows from `batch`; found {rows.shape[0]}")
        if self._order is None or rows.ndim == 1:
            return rows
        if rows.shape[1] != len(self._order):
            message = f"expected rows of {len(self._order)} tokens from the data; found {rows.shape[1]}"
            raise UserError(f"data.sequence: {message}")
        return rows[:, self._order]

    def _place(self, rows: np.ndarray, sharding: jax.sharding.NamedSharding) -> jax.Array:
        # With several processes device_put compares the rows of all of them by a collective. This thread would issue
        # it among the collectives of the step, and processes would wait for each other in different ones.

        def shard(index: Any) -> np.ndarray:
            local = self._position[index[0]]
            return rows[(slice(local[0], local[-1] + 1), *index[1:])]

        return jax.make_array_from_callback((self._rows, *rows.shape[1:]), sharding, shard)


def placer(dataset: Any, program: Program) -> Placer:
    """Returns the placer of a dataset's batches, of the rows of a step unless it has others (`batch_rows`)."""
    config, sharder = program.config, program.sharder
    rows = getattr(dataset, "batch_rows", config.data.global_batch)
    has_sequence = has_token_rows(config.model, config.data)
    order = row_order(config.context_parallel, config.data.sequence, sharder) if has_sequence else None
    fetch = dataset.batch
    if model_spec(config.model).reads_tokens and not config.data.is_text:
        fetch = partial(_fetch_tokens, dataset.batch, config.data.sequence)
    return Placer(fetch, sharder, rows, has_sequence, order)


def _fetch_tokens(fetch: Fetch, sequence: int, step: int, rows: Any) -> dict[str, np.ndarray]:
    return complete_token_rows(fetch(step, rows), sequence)


def complete_token_rows(batch: Mapping[str, Any], sequence: int) -> dict[str, np.ndarray]:
    """Returns rows of a user's own data with all that a model of tokens reads.

    Args:
        batch: `tokens` [rows, sequence] and, where they are not the following, `targets` (the next token of the row),
            `positions` (0 to sequence - 1), `segments` (1: one document a row; 0: padding) and `weights` (1, but 0
            where a row without `targets` ends); and others, which stay as they are.
        sequence: tokens of a row.

    Raises:
        DataError: no `tokens`, or rows of another length.
    """
    expected = f"expected `tokens`, integers [rows, {sequence}]"
    if "tokens" not in batch:
        raise DataError(f"data: the model reads tokens, and a batch has {join_words(sorted(batch), 'and')}; {expected}")
    tokens = np.asarray(batch["tokens"])
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or tokens.shape[1] != sequence:
        found = f"{tokens.dtype} [{', '.join(map(str, tokens.shape))}]"
        raise DataError(f"data.sequence: {expected}, from the data; found {found}")
    weights = np.ones(tokens.shape, np.float32)
    if "targets" not in batch:
        weights[:, -1] = 0.0
    complete = {
        "targets": np.roll(tokens, -1, axis=1),
        "positions": np.broadcast_to(np.arange(sequence, dtype=np.int32), tokens.shape),
        "segments": np.ones(tokens.shape, np.int32),
        "weights": weights,
    }
    return complete | {key: np.asarray(value) for key, value in batch.items()}


def row_order(context_parallel: str, sequence: int, sharder: Sharder) -> np.ndarray | None:
    """Returns the order of the tokens of a device row; None if it is the natural one.

    The host permutes the rows once. Device code reads the order from `positions` and `segments` alone.
    """
    shards = sharder.size(CONTEXT)
    return zigzag(sequence, shards) if context_parallel == "ring" and shards > 1 else None


def process_shard(config: Config, devices: Sequence[Any]) -> DataShard:
    """Returns the share of the rows that this process holds on the mesh of a config.

    Raises:
        UserError: the layout does not fit the devices, or processes hold overlapping rows.
    """
    layout = resolve_layout(config.layout, config.mesh, config.axis_rules, len(devices))
    sharder = Sharder(make_mesh(layout, devices), layout.rules, config.zero)
    rows = config.data.global_batch
    spans = batch_sharding(sharder, 1, False).devices_indices_map((rows,))
    held: dict[int, set[int]] = defaultdict(set)
    for device, index in spans.items():
        held[device.process_index] |= set(range(*index[0].indices(rows)) if index else range(rows))
    return shard_of({process: tuple(sorted(found)) for process, found in held.items()}, rows, jax.process_index())


def shard_of(held: Mapping[int, tuple[int, ...]], rows: int, process: int) -> DataShard:
    """Returns the share of a process.

    Args:
        held: process -> its rows, ascending.
        rows: of the global batch.
        process: number of the process.

    Raises:
        UserError: two processes hold some rows in common, but not all.
    """
    shares = sorted(set(held.values()))
    if sum(map(len, shares)) != rows or len({len(share) for share in shares}) != 1:
        message = "processes hold some rows of the batch in common, but not all"
        raise UserError(f"mesh: {message}; expected the devices of a process to hold whole shares of the rows")
    own = held[process]
    peers = tuple(sorted(other for other, found in held.items() if found == own))
    leaders = tuple(min(other for other, found in held.items() if found == share) for share in shares)
    return DataShard(shares.index(own), len(shares), own, peers, leaders)
