"""Selections of cases for `make test`; `make matrix` or `make test ALL=1` runs the others."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import pytest


def one_in(number: int, rows: Iterable[Any], columns: Iterable[Any] = ()) -> list[Any]:
    """Returns parameters of all pairs of a row and a column, or of the rows alone; all but one in `number` are marked.

    Each row is tested with some columns, and each column with some rows.
    """
    found, columns = [], list(columns)
    for i, row in enumerate(rows):
        for j, values in enumerate([(row, column) for column in columns] or [(row,)]):
            marks = [pytest.mark.matrix] if (i + j) % number else []
            found.append(pytest.param(*values, marks=marks, id="-".join(map(str, values))))
    return found


def left_out_cases(items: list[pytest.Item], sample: int) -> set[str]:
    """Returns the ids of what `sampled(N)` leaves out. Of each test one case in N stays; N samples have them all."""
    cases: dict[str, list[tuple[int, str]]] = {}
    numbers: dict[str, int] = {}
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            among = item.location[0] if mark.kwargs.get("among") == "file" else item.nodeid.partition("[")[0]
            cases.setdefault(among, []).append((zlib.crc32(item.nodeid.encode()), item.nodeid))
            numbers[among] = mark.args[0]
    left_out = set()
    for among, found in cases.items():
        number = min(numbers[among], len(found))
        left_out |= {case for i, (_, case) in enumerate(sorted(found)) if (i - sample) % number}
    return left_out
