"""Rows of replicas from several batches: each its part, read once, for any rows that a process asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxtrain.data.replica_rows import ReplicaRows

ROWS = 12


class Numbered:
    """Row i of batch n has the value 100 n + i; keeps what was read."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def batch(self, step: int, rows: Any = None) -> dict[str, np.ndarray]:
        index = np.arange(ROWS)[slice(None) if rows is None else rows]
        self.read.append((step, len(index)))
        x = 100 * step + index
        return {"x": x, "wide": np.stack([x, x], 1).astype(np.float32)}


@pytest.mark.parametrize("rows", [None, slice(None), slice(3, 9), [0, 2, 5, 7, 11], np.array([10, 3, 4])], ids=str)
def test_each_replica_has_its_part_of_its_batch(rows: Any) -> None:
    batches = [7, 5, 7, 2]
    found = ReplicaRows(Numbered(), lambda step: batches, ROWS).batch(0, rows)
    wanted = np.arange(ROWS)[slice(None) if rows is None else rows]
    expected = np.array([100 * batches[row // 3] + row for row in wanted])
    np.testing.assert_array_equal(found["x"], expected)
    np.testing.assert_array_equal(found["wide"], np.stack([expected, expected], 1))
    assert found["x"].dtype == np.arange(1).dtype
    assert found["wide"].dtype == np.float32


def test_a_batch_is_read_once_and_only_its_rows() -> None:
    data = Numbered()
    ReplicaRows(data, lambda step: [7, 5, 7, 2], ROWS).batch(0)
    assert data.read == [(2, 3), (5, 3), (7, 6)]


@pytest.mark.parametrize("batches", [[4], [4, 4, 4]])
def test_rows_of_one_batch_are_that_batch(batches: list[int]) -> None:
    data = Numbered()
    found = ReplicaRows(data, lambda step: batches, ROWS).batch(3, slice(2, 5))
    np.testing.assert_array_equal(found["x"], [402, 403, 404])
    assert data.read == [(4, 3)]
