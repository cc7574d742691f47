"""The rows of an island: its part of each global batch, so that the data order is that of one run."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxtrain.data.dataset import Rows


class IslandRows:
    """Data of which an island trains on its part: of n islands number i has the i-th of n equal parts of the rows.

    All else is that of the data.

    Args:
        data: has `batch(step, rows)`, a pure function.
        island: index of the island.
        rows: of a step of an island.
    """

    def __init__(self, data: Any, island: int, rows: int) -> None:
        self._data, self._first, self._rows = data, island * rows, rows

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns rows of the island's part of a step."""
        own = np.arange(self._first, self._first + self._rows)
        return self._data.batch(step, own[slice(None) if rows is None else rows])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


class WholeBatches:
    """Validation data, of which every island reads whole batches.

    Attributes:
        batch_rows: rows of a batch, which are more than those of a step of the island.
    """

    def __init__(self, data: Any, rows: int) -> None:
        self._data, self.batch_rows = data, rows

    def batch(self, index: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns rows of a batch."""
        return self._data.batch(index, rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)
