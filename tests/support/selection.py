"""Selections of combinations for `make test`; `make matrix` runs the others."""

from __future__ import annotations

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
