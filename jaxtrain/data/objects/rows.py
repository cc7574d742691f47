"""Data of rows that are there all at once: arrays, and data sets with a length and an index."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.data.dataset import Rows
from jaxtrain.data.objects.batch_arrays import Spec, check_same_spec, one_line, spec_of, to_arrays
from jaxtrain.data.order import permute
from jaxtrain.errors import DataError, UnreadableBatchError

SAMPLE = 16  # rows by which a data set is recognised on resume


class RowOrder:
    """Order of rows by (seed, step): each epoch once, in a new permutation. Rows that fill no batch are left out of it.

    Args:
        rows: number of rows.
        global_batch: rows of a step.
        seed: of the order.
        name: of the data, for messages.

    Attributes:
        batches: steps of an epoch.

    Raises:
        DataError: fewer rows than a batch has.
    """

    def __init__(self, rows: int, global_batch: int, seed: int, name: str) -> None:
        if rows < global_batch:
            raise DataError(f"{name}: {rows} rows are fewer than data.global_batch {global_batch}")
        self._rows, self._global_batch, self._seed = rows, global_batch, seed
        self.batches = rows // global_batch

    def rows_of(self, step: int, rows: Rows) -> np.ndarray:
        """Returns the rows of a step, or of some positions in its global batch."""
        epoch, index = divmod(step, self.batches)
        positions = np.arange(index * self._global_batch, (index + 1) * self._global_batch)
        return permute(positions if rows is None else positions[rows], self._rows, self._seed, epoch)


class ArrayData:
    """Rows of arrays in the order of (seed, step): each epoch once, in a new permutation.

    Args:
        arrays: {name: array [rows, ...]}.
        global_batch: rows of a step.
        seed: of the order.
        name: of the argument, for messages.

    Attributes:
        batches: steps of an epoch; the rows that fill no batch are left out of it.
        fingerprint: digest of shapes, dtypes and values.

    Raises:
        DataError: no arrays, of different numbers of rows, or of fewer rows than a batch.
    """

    def __init__(self, arrays: Mapping[str, Any], global_batch: int, seed: int = 0, name: str = "data") -> None:
        self._arrays = to_arrays(arrays, name)
        lengths = {key: len(value) if value.ndim else 0 for key, value in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{name}: arrays of {lengths} rows; expected the same number in each")
        self._order = RowOrder(next(iter(lengths.values())), global_batch, seed, name)
        self.batches = self._order.batches
        self.fingerprint = _fingerprint(self._arrays)

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns the rows of a step."""
        chosen = self._order.rows_of(step, rows)
        return {key: value[chosen] for key, value in self._arrays.items()}


class RowData:
    """Rows of a `datasets.Dataset`, a torch `Dataset` or another object with a length and an index, likewise.

    Args:
        source: `len(source)` rows. `source[i]` is a dict of numbers or arrays, and for a `datasets.Dataset`
            `source[[i, j]]` a dict of columns.
        global_batch: rows of a step.
        seed: of the order.
        name: of the argument, for messages.

    Attributes:
        batches: steps of an epoch.
        fingerprint: digest of the number of rows and of the values of some.

    Raises:
        DataError: fewer rows than a batch, or a column that has no numbers.
    """

    def __init__(self, source: Any, global_batch: int, seed: int = 0, name: str = "data") -> None:
        self._has_columns = hasattr(source, "column_names")
        if self._has_columns and source.format["type"] is None:
            source = source.with_format("numpy")
        self._source, self._name = source, name
        self._spec: Spec = {}  # of a row
        self._order = RowOrder(len(source), global_batch, seed, name)
        self.batches = self._order.batches
        sample = np.unique(np.linspace(0, len(source) - 1, SAMPLE).astype(int))
        self.fingerprint = f"{len(source)}-{_fingerprint(self._read(sample))}"

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns the rows of a step.

        Raises:
            DataError: rows of different keys, shapes or dtypes.
        """
        return self._read(self._order.rows_of(step, rows))

    def _read(self, chosen: np.ndarray) -> dict[str, np.ndarray]:
        indices = chosen.tolist()
        try:
            if self._has_columns:
                return self._checked(to_arrays(self._source[indices], f"{self._name}: rows"))
            found = [self._source[index] for index in indices]
        except DataError:
            raise
        except Exception as error:
            raise UnreadableBatchError(f"{self._name}: rows cannot be read: {one_line(error)}") from error
        rows = [to_arrays(row, f"{self._name}: row {index}") for index, row in zip(indices, found)]
        for index, row in zip(indices, rows):
            check_same_spec(spec_of(row), spec_of(rows[0]), f"{self._name}: row {index}")
        return self._checked({key: np.stack([row[key] for row in rows]) for key in rows[0]})

    def _checked(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        spec = {key: (value.shape[1:], value.dtype) for key, value in batch.items()}
        self._spec = self._spec or spec
        check_same_spec(spec, self._spec, f"{self._name}: a row")
        return batch


def _fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        found.update(f"{key} {array.shape} {array.dtype}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:16]
