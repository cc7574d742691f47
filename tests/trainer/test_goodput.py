"""A real run that fails and goes on: its ledgers add up to the time by the clock, and what was done again is known."""

from __future__ import annotations

import io
import json
import time

import linear_model
import numpy as np
import pytest
from rich.console import Console

import jaxtrain
from jaxtrain.reports.history import read_history
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trackers.goodput import GoodputLedger


class Rows:
    """Data of `linear_model.Linear` that fail, and take their time, at some steps."""

    fails: int | None = None
    slow = ()

    def __init__(self, split, seed, global_batch):
        self.rows = global_batch

    def batch(self, step, rows=None):
        if step == self.fails:
            raise OSError("the disk is gone")
        if step in self.slow:
            time.sleep(0.25)
        return {name: np.asarray(value)[rows] for name, value in linear_model.batch(self.rows, 4).items()}


def train(tmp_path, **options):
    base = {
        "dir": str(tmp_path), "steps": 8, "precision": "fp32", "simulate": 8, 
        "mesh": {"data": 8}, "rules": {"batch": "data"}, "log": {"tensorboard": False}, "checkpoint": {"every": 3},
        "model": {"type": "linear_model:Linear", "options": {"size": 4}},
        "data": {"type": "test_goodput:Rows", "global_batch": 8},
    }  # fmt: skip
    screen = ConsoleTracker(8, console=Console(file=io.StringIO(), width=100), live=False)
    return jaxtrain.train(jaxtrain.load(None, base=base), run_dir=tmp_path / "run", console=screen, **options)


@pytest.mark.measures
def test_a_run_that_fails_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Rows, "fails", 5)
    begun = time.monotonic()
    with pytest.raises(OSError, match="the disk is gone"):
        train(tmp_path, ledger=GoodputLedger())
    first = time.monotonic() - begun
    monkeypatch.setattr(Rows, "fails", None)
    monkeypatch.setattr(Rows, "slow", (6, 7))
    time.sleep(0.3)
    train(tmp_path, resume=True, ledger=GoodputLedger(age=0.2))
    run = read_history(tmp_path / "run")
    failed, finished = run.attempts
    assert failed.cause == "OSError: the disk is gone"
    assert run.state == "finished"
    assert (failed.first, failed.last, finished.first, finished.last) == (0, 5, 3, 8)
    assert first / 2 < failed.elapsed < first + 1e-3  # all but what follows the stop event; in milliseconds
    assert finished.seconds["init"] > 0.2
    assert finished.seconds["data"] >= 0.4
    assert finished.seconds["replay"] > 0  # steps 4 and 5; the first of them is in `compile`
    assert failed.seconds["replay"] == 0
    assert all(attempt.seconds[name] > 0 for attempt in run.attempts for name in ("compile", "compute", "checkpoint"))
    assert finished.seconds["restore"] > 0
    whole = run.attempts[-1].ended - run.attempts[0].began
    assert sum(run.seconds.values()) == run.elapsed == pytest.approx(whole, abs=0.05)


def test_a_step_done_again_is_a_replay_however_often_the_run_dies(tmp_path, monkeypatch):
    """The second attempt dies before it has come to where the first one was."""
    for fails in (5, 4):
        monkeypatch.setattr(Rows, "fails", fails)
        with pytest.raises(OSError, match="gone"):
            train(tmp_path, resume=fails == 4)
    monkeypatch.setattr(Rows, "fails", None)
    train(tmp_path, resume=True)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    reached = [event["reached"] for event in map(json.loads, lines) if event["kind"] == "ledger"]
    assert reached == sorted(reached)
    assert reached[-1] == 8
    attempts = read_history(tmp_path / "run").attempts
    assert [(attempt.first, attempt.last) for attempt in attempts] == [(0, 5), (3, 4), (3, 8)]
    assert attempts[1].seconds["compute"] == 0  # step 4 was done before
