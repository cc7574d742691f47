"""What `make test` leaves out of the tests marked `sampled`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from selection import left_out_cases


def items(name: str, cases: int, mark: pytest.MarkDecorator | None) -> list[Any]:
    found = mark and SimpleNamespace(args=mark.args, kwargs=mark.kwargs)
    return [
        SimpleNamespace(nodeid=f"{name}[{i}]", location=(name.partition("::")[0],), get_closest_marker=lambda _: found)
        for i in range(cases)
    ]


WIDE = items("a.py::test_wide", 10, pytest.mark.sampled(3))
NARROW = items("a.py::test_narrow", 2, pytest.mark.sampled(3))
FILE = [*items("b.py::test_one", 1, pytest.mark.sampled(2, among="file")),
        *items("b.py::test_other", 1, pytest.mark.sampled(2, among="file"))]  # fmt: skip
PLAIN = items("a.py::test_plain", 5, None)


@pytest.mark.parametrize(("cases", "number"), [(WIDE, 3), (NARROW, 2), (FILE, 2)])
def test_each_case_runs_in_one_of_n_samples(cases: list[Any], number: int):
    runs = [
        item.nodeid for sample in range(number) for item in cases if item.nodeid not in left_out_cases(cases, sample)
    ]
    assert sorted(runs) == sorted(item.nodeid for item in cases)


def test_each_sample_has_some_of_every_test_and_all_of_those_without_the_mark():
    for sample in range(6):
        left = left_out_cases([*WIDE, *NARROW, *FILE, *PLAIN], sample)
        kept = [item.nodeid for item in [*WIDE, *NARROW, *FILE, *PLAIN] if item.nodeid not in left]
        assert sum("wide" in name for name in kept) in (3, 4)
        assert [sum(text in name for name in kept) for text in ("narrow", "b.py", "plain")] == [1, 1, 5]
