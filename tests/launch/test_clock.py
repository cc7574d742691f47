"""A machine's clock that is set by an hour, forward and back: no limit is hit, and no duration is negative."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_member import NEEDS_ETCD, Etcd
from launched import losses, undisturbed
from scene import Scene, alive, finished, until
from wrong_clock import NEEDS_FAKETIME, WrongClock

from jaxtrain.reports.history import as_dict, read_history

pytestmark = NEEDS_FAKETIME

HOUR = 3600


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[WrongClock]:
    clock = WrongClock(tmp_path / "clock")
    yield clock
    clock.close()


def durations(value: Any, key: str = "") -> Iterator[float]:
    """Numbers that are seconds, by their keys."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from durations(item, key if key == "seconds" else name)
    elif isinstance(value, list):
        for item in value:
            yield from durations(item, key)
    elif isinstance(value, int | float) and key in ("seconds", "elapsed", "step_time", "data_wait"):
        yield value


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_clock_that_is_set_ends_nothing(clock: WrongClock, scene: Scene):
    node = scene.nodes(2)
    started = [node(index, "--heartbeat=12", **clock.environ) for index in range(2)]
    workers = [scene.pid(1, rank) for rank in range(2)]
    for seconds in (HOUR, -HOUR):
        clock.set(seconds)
        time.sleep(4)  # a heartbeat; what compares times sees the jump at once
        assert all(map(alive, workers)), scene.output()
    assert not [word for word in ("gone", "lost", "no leader", "ended") if word in scene.output()], scene.output()
    os.kill(scene.leader(started[0]), signal.SIGKILL)  # the next one goes on from a state of the future
    until(lambda: "goes on under a new leader" in scene.terminal(), scene.terminal())
    os.kill(workers[1], signal.SIGKILL)
    assert scene.count(2) == 2
    clock.set(HOUR)
    started[0].terminate()
    assert [finished(process) for process in started] == [75, 75], scene.output()
    found = records(scene.folder / "launch.jsonl")
    assert [record["generation"] for record in found if record["kind"] == "end"] == [1, 2]
    assert all(0 <= seconds < HOUR / 2 for seconds in durations(found)), found


@NEEDS_ETCD
def test_a_lease_outlives_a_clock_that_is_set_and_the_next_job_begins(clock: WrongClock, etcd: Etcd, scene: Scene):
    given = ("node", "x", "--nodes=2", f"--store=etcd://{etcd.address}", "--processes=1", "--heartbeat=12")
    for generation, ahead in enumerate((HOUR, -HOUR), start=1):
        started = [scene.start(*given, f"--node={index}", **clock.environ) for index in range(2)]
        workers = [scene.pid(generation, rank) for rank in range(2)]
        clock.set(ahead)
        time.sleep(4)
        assert all(map(alive, workers)), scene.output()
        started[1].terminate()
        assert [finished(process) for process in started] == [75, 75], scene.output()
        clock.set(0)  # the next job begins an hour before this one ended
    assert "leads no more" not in scene.output()
    assert scene.ends() == [("node 1 received signal 15", 75)] * 2


@pytest.mark.matrix
def test_a_run_is_the_undisturbed_one_under_a_clock_that_is_set(tmp_path: Path, clock: WrongClock, launched):
    """JAX's coordination service tells heartbeats by this clock: it ends a generation, and the next one goes on."""
    steps = 40  # the service needs some seconds to see that the clock was set
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.1)
    local = job.start("local", "--processes=2", "--devices-per-process=2", job.config, **clock.environ)
    job.reaches(4)
    for generation, ahead in ((2, HOUR), (3, -HOUR)):
        clock.set(ahead)
        job.until(lambda n=generation: len(job.events("start")) == n, "JAX has another clock: tell docs/reliability.md")
        job.reaches(max(losses(job.run)) + 2)
    assert local.wait(240) == 0, job.terminal()
    job.as_expected(expected)
    causes = [end["cause"] for end in job.events("end")]
    assert [cause.split()[0] for cause in causes] == ["process", "process", "finished"]
    history = read_history(job.run)
    seconds = [*durations(as_dict(history)), *durations(records(job.run / "metrics.jsonl"))]
    assert len(seconds) > 20
    assert all(0 <= value < HOUR / 2 for value in seconds), as_dict(history)
    assert [attempt.cause for attempt in history.attempts] == causes
