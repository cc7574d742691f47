"""Draws and figures of benchmarks/islands_faults.py against sums by hand, and its configs."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import load_benchmark

from jaxtrain.core.resolve import resolve


@pytest.fixture
def faults() -> ModuleType:
    return load_benchmark("islands_faults")


def test_cases_are_functions_of_the_seed(faults: Any) -> None:
    found = faults.cases(0, 10, 960)
    assert found == faults.cases(0, 10, 960)
    assert [case.name for case in found[1:5]] == list(faults.KINDS)
    schedules = [case for case in found if case.name.startswith("schedule")]
    assert schedules != [case for case in faults.cases(1, 10, 960) if case.name.startswith("schedule")]
    assert len(schedules) == 10
    for case in schedules:
        steps = [fault.step for fault in case.faults]
        assert 2 <= len(steps) <= 4
        assert steps == sorted(steps)
        assert all(step % faults.EVERY == 0 and 0 < step < case.steps for step in steps)
        late = [fault.island for fault in case.faults if fault.kind == "late"]
        assert late in ([], [faults.ISLANDS - 1])
        if late:  # it is not there yet
            assert all(fault.island != late[0] for fault in case.faults if fault.kind != "late")


@pytest.mark.parametrize("name", ["undisturbed", "late"])
def test_configs_are_of_islands(faults: Any, tmp_path: Path, name: str) -> None:
    (case, *_) = (case for case in faults.cases(0, 0, 960) if case.name == name)
    config, _ = resolve(str(faults.config_of(case, tmp_path)))
    assert (config.islands.count, config.sync.strategy, config.sync.every) == (4, "diloco", faults.EVERY)
    assert config.islands.quorum == (3 if name == "late" else 0)


def test_a_push_that_is_in_no_update_is_lost(faults: Any) -> None:
    pushes = [{"event": "push", "island": island} for island in (0, 1, 0, 1)]
    first, second = ({"event": "update", "islands": islands} for islands in ([0, 1], [1]))
    assert faults.lost([*pushes, first, second]) == 1
    assert faults.lost([*pushes, first, first]) == 0


def test_the_island_that_is_furthest_counts(faults: Any) -> None:
    assert faults.against({"losses": [2.0, 2.0, 1.9, 2.02]}, 2.0) == pytest.approx(-0.05)
    assert faults.against({"losses": [2.0, None, 2.0, 2.0]}, 2.0) == math.inf
