"""Every strategy on two processes, each with one replica, against one process with both."""

from __future__ import annotations

import json
from pathlib import Path

import data_runs
import pytest


def test_two_processes_train_as_one(tmp_path: Path):
    for count in (1, 2):
        place = tmp_path / str(count)
        place.mkdir()
        done = data_runs.launch("sync_processes.py", place, count=count)
        assert [code for code, _ in done] == [0] * count, done
    first, second = (json.loads((tmp_path / f"2/losses-{index}.json").read_text()) for index in range(2))
    assert first == second
    alone = json.loads((tmp_path / "1/losses-0.json").read_text())
    assert first.keys() == alone.keys()
    for name, losses in alone.items():
        assert first[name] == pytest.approx(losses, rel=1e-5), name
        assert len(set(losses)) == 10
    assert len({tuple(losses) for losses in alone.values()}) == len(alone)  # each is a strategy of its own
