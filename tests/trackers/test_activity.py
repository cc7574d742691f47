"""Lines on a silent terminal: what a run is doing and since when, at growing intervals; nothing while steps go on."""

from __future__ import annotations

import io
import time
from itertools import pairwise

from rich.console import Console

from jaxtrain.trackers.activity import LONGEST_WAIT, ActivityClock, Reminder
from jaxtrain.trackers.console import ConsoleTracker, Status, live_line
from jaxtrain.trackers.goodput import GoodputLedger


class Simulation:
    """A run in simulated seconds, with what its console prints, as (second, text)."""

    def __init__(self):
        self.time, self.printed, self.lines = 0.0, 0.0, []
        self.ledger = GoodputLedger(clock=lambda: self.time)
        self.clock = ActivityClock(self.ledger, lambda: self.time)
        self.reminder = Reminder(self.clock.now, lambda: self.time - self.printed, self.show)

    def show(self, activity):
        self.lines.append((self.time, f"{activity.text} {activity.seconds:.0f}"))
        self.printed = self.time

    def wait(self, seconds: float):
        for _ in range(round(2 * seconds)):
            self.time += 0.5
            self.reminder.look()


def test_a_start_of_short_parts_is_not_silent():
    run = Simulation()
    for text in ("importing JAX", "opening the data", "building the model", "creating the parameters"):
        run.clock.say(text)
        run.wait(2)
    assert run.lines == [(3.0, "opening the data 1"), (6.0, "building the model 2")]


def test_what_lasts_is_said_ever_more_rarely():
    run = Simulation()
    run.ledger.begin("compile")
    run.wait(3600)
    times = [second for second, _ in run.lines]
    assert times[:4] == [3.0, 9.0, 17.5, 34.5]  # the phase is seen half a second after it began
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_WAIT
    assert run.lines[1] == (9.0, "compiling the train step 8")


def test_steps_are_silent_and_a_validation_counts_from_its_beginning():
    run = Simulation()
    run.ledger.begin("compute")
    for step in range(200):
        run.ledger.begin_step(step)
        with run.ledger.phase("data"):  # most of the time, but each wait is short
            run.wait(1)
        run.wait(0.5)
    assert run.lines == []
    with run.ledger.phase("eval"):
        run.wait(5)
    run.wait(60)
    with run.ledger.phase("eval"):
        run.wait(5)
    assert [text for _, text in run.lines] == ["validating 2", "validating 2"]


def test_data_that_does_not_come_is_said():
    run = Simulation()
    run.ledger.begin("compute")
    run.wait(10)
    with run.ledger.phase("data"):
        run.wait(4)
    assert [text for _, text in run.lines] == ["waiting for data 2"]


def recorded(live: bool) -> tuple[ConsoleTracker, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=live, color_system=None, legacy_windows=False)
    return ConsoleTracker(30, console=console, live=live), out


def test_a_log_gets_lines_until_it_is_closed(monkeypatch):
    monkeypatch.setattr("jaxtrain.trackers.activity.SILENCE", 0.2)
    monkeypatch.setattr("jaxtrain.trackers.activity.PERIOD", 0.05)
    screen, out = recorded(live=False)
    screen.watch(GoodputLedger())
    screen.say("importing JAX")
    deadline = time.monotonic() + 60
    while "importing JAX: " not in out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    screen.close()
    text = out.getvalue()
    assert text.startswith("importing JAX: 0 s so far\n")
    time.sleep(0.5)
    assert out.getvalue() == text


def test_a_terminal_shows_it_in_the_line():
    screen, out = recorded(live=True)
    screen.watch(GoodputLedger())
    screen.say("importing JAX")
    screen.close()
    assert "importing JAX 0:0" in out.getvalue()


def test_other_processes_of_a_run_say_nothing(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    screen, out = recorded(live=True)
    screen.watch(GoodputLedger())
    screen.close()
    assert out.getvalue() == ""


def test_metrics_of_a_user_are_on_the_line():
    values = {"loss": 0.5, "cross_entropy": 0.5, "accuracy": 0.75, "tokens": 512, "eval/accuracy": 0.7, "skipped": 0.0}
    line = live_line(Status(10, 1, values), 160).plain
    assert line.endswith(" accuracy 0.7500")
    assert "cross_entropy" not in line  # the loss again
    assert "accuracy" not in live_line(Status(10, 1, values), 60).plain
