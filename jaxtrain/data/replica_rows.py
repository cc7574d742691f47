"""Batches whose rows are of several steps of the data order: each replica's part is of a step of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.dataset import Rows


class ReplicaRows:
    """Data in which the rows of each replica are those of a batch of its own.

    Args:
        data: has `batch(step, rows)`, a pure function.
        batches: step -> index of the batch of each replica, or one for all.
        global_batch: rows of a step. Replica i of n has the i-th of n equal parts.
    """

    def __init__(self, data: Any, batches: Callable[[int], Sequence[int]], global_batch: int) -> None:
        self._data, self._batches, self._global_batch = data, batches, global_batch

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns rows of the mixed batch of a step; each batch that is part of it is read once."""
        indices = np.asarray(self._batches(step))
        if (indices == indices[0]).all():
            return self._data.batch(int(indices[0]), rows)
        wanted = np.arange(self._global_batch)[slice(None) if rows is None else rows]
        source = indices[wanted * len(indices) // self._global_batch]  # of each row
        mixed: dict[str, np.ndarray] = {}
        for index in np.unique(source):
            places = np.flatnonzero(source == index)
            for name, values in self._data.batch(int(index), wanted[places]).items():
                values = np.asarray(values)
                target = mixed.setdefault(name, np.empty((len(wanted), *values.shape[1:]), values.dtype))
                target[places] = values
        return mixed
