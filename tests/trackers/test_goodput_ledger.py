"""The ledger under a clock in the hand of the test: every second in one bucket, whatever is entered and left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.trackers.base import TrackerList
from jaxtrain.trackers.files import JsonlTracker, furthest_step
from jaxtrain.trackers.goodput import BUCKETS, GoodputLedger, LedgerWriter


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


seconds = st.floats(0, 1e4)
names = st.sampled_from(sorted(BUCKETS))
acts = st.recursive(
    st.one_of(
        st.tuples(st.just("wait"), seconds),
        st.tuples(st.just("begin"), names),
        st.tuples(st.just("at"), st.integers(0, 9)),
    ),
    lambda inner: st.tuples(st.just("phase"), names, st.lists(inner, max_size=4), st.booleans()),
    max_leaves=30,
)


class Stop(Exception):
    """Leaves a phase by an exception."""


@given(st.lists(acts, max_size=20), st.floats(0, 1e3), st.integers(0, 9))
def test_every_second_is_in_one_bucket(todo, age, reached):
    """Against a count of its own, that books every wait where the innermost phase says."""
    clock = Clock()
    ledger = GoodputLedger(age=age, clock=clock)
    ledger.furthest_step = reached
    expected = dict.fromkeys(BUCKETS, 0.0) | {"init": age}
    model = {"base": "init", "replay": False, "reached": reached}

    def run(act, inside):
        kind, *rest = act
        if kind == "wait":
            clock.now += rest[0]
            is_replay = model["base"] == "compute" and model["replay"]
            expected[inside or ("replay" if is_replay else model["base"])] += rest[0]
        elif kind == "begin":
            ledger.begin(rest[0])
            model["base"] = rest[0]
        elif kind == "at":
            ledger.begin_step(rest[0])
            model["replay"] = rest[0] <= model["reached"]
            model["reached"] = max(model["reached"], rest[0])
        else:
            name, inner, fails = rest
            try:
                with ledger.phase(name):
                    for one in inner:
                        run(one, name)
                    if fails:
                        raise Stop
            except Stop:
                pass

    for act in todo:
        run(act, None)
    elapsed, found = ledger.totals()
    assert elapsed == pytest.approx(clock.now - 1000.0 + age)
    assert sum(found.values()) == pytest.approx(elapsed, abs=1e-6)
    assert found == pytest.approx(expected, abs=1e-6)
    assert ledger.furthest_step == model["reached"]


def test_steps_done_before_are_replays_until_new_ground():
    clock = Clock()
    ledger = GoodputLedger(clock=clock)
    ledger.furthest_step = 7
    ledger.begin("compute")
    for step in (5, 6, 7, 8, 9):
        ledger.begin_step(step)
        clock.now += 1
        with ledger.phase("data"):
            clock.now += 0.25
    ledger.begin_step(6)  # a run that goes back by itself
    clock.now += 4
    found = ledger.seconds()
    assert (found["replay"], found["compute"], found["data"]) == (3 + 4, 2, 5 * 0.25)
    assert ledger.furthest_step == 9


def test_the_time_of_a_step_is_its_own():
    clock = Clock()
    ledger = GoodputLedger(clock=clock)
    ledger.begin("compile")
    ledger.begin_step(1)
    clock.now += 100
    ledger.begin("compute")
    for step in range(2, 8):
        assert (ledger.step_time() is None) == (step < 6)  # of three steps nothing is known
        clock.now += 2
        with ledger.phase("eval"):
            clock.now += 50
        ledger.begin_step(step)
    assert ledger.step_time() == 2


def test_what_is_no_bucket_is_refused():
    ledger = GoodputLedger()
    with pytest.raises(ValueError, match="no bucket `lunch`; expected one of compute"), ledger.phase("lunch"):
        pass
    with pytest.raises(ValueError, match="no bucket"):
        ledger.begin("lunch")


def test_another_thread_may_look_at_any_time():
    ledger, done = GoodputLedger(), threading.Event()
    wrong = []

    def snapshot():
        while not done.is_set():
            elapsed, found = ledger.totals()
            if abs(sum(found.values()) - elapsed) > 1e-6:
                wrong.append((elapsed, found))

    thread = threading.Thread(target=snapshot)
    thread.start()
    for step in range(3000):
        with ledger.phase("data"):
            pass
        ledger.begin_step(step)
    done.set()
    thread.join()
    assert not wrong


def test_records_come_often_at_first_and_seldom_later(tmp_path):
    clock, said, at = Clock(), [], []
    ledger = GoodputLedger(clock=clock)
    records = LedgerWriter(ledger, lambda kind, **fields: (said.append((kind, fields)), at.append(clock.now - 1000)))
    ledger.begin("compile")
    for _ in range(4000):
        records()
        clock.now += 1
    gaps = [after - before for before, after in pairwise(at)]
    assert gaps[:20] == [1] * 20
    assert max(gaps) == 30
    assert all(gap <= max(1, before / 50 + 1) for before, gap in zip(at, gaps))
    assert len(at) < 300
    kind, fields = said[-1]
    assert kind == "ledger"
    assert sum(fields["seconds"].values()) == pytest.approx(fields["elapsed"])
    assert fields["phase"] == "compile"


def test_records_reach_the_file_and_nobody_else(tmp_path):
    class Loud:
        def start(self, info): ...
        def close(self): ...
        def event(self, kind, **fields):
            raise AssertionError("a record is no news")

    observers = TrackerList([JsonlTracker(tmp_path), Loud()])
    observers.start({"step": 0})
    ledger = GoodputLedger()
    LedgerWriter(ledger, observers.record).write()
    observers.close()
    start, record = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert (start["kind"], record["kind"]) == ("start", "ledger")
    assert record["seconds"].keys() <= {"init"}


def test_furthest_step_is_that_of_any_life(tmp_path):
    assert furthest_step(tmp_path) == 0
    files = JsonlTracker(tmp_path)
    files.start({"step": 0})
    for step in range(1, 11):
        files.log(step, {"loss": 1.0})
    assert furthest_step(tmp_path) == 10
    files.event("ledger", step=11, reached=12)
    files.close()
    again = JsonlTracker(tmp_path)
    again.start({"step": 4})  # cuts the metrics of 5 to 10
    again.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": "ledger", "step": 99')
    assert furthest_step(tmp_path) == 12


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_the_age_of_a_process_counts_its_imports():
    code = "import time; time.sleep(0.3); from jaxtrain.trackers.goodput import process_age; print(process_age())"
    begun = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert 0.25 < float(said) < time.monotonic() - begun + 0.05
