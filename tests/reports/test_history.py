"""The history of a run, from folders as runs leave them: whole, killed in the middle of a line, going on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_examples import BEGAN, Folder, three_attempts

from jaxtrain.checkpoint import Committed
from jaxtrain.checkpoint.events import Copied
from jaxtrain.errors import UserError
from jaxtrain.reports import history, tables
from jaxtrain.reports.history import ALL_BUCKETS, as_dict, format_seconds, read_history


def test_every_second_from_the_first_start_to_the_last_word(tmp_path):
    three_attempts(tmp_path)
    run = read_history(tmp_path)
    assert [attempt.began - BEGAN for attempt in run.attempts] == pytest.approx([0, 120, 180])
    assert run.elapsed == pytest.approx(280)
    assert sum(run.seconds.values()) == pytest.approx(280)
    expected = {
        "compute": 120, "data": 24, "compile": 40, "init": 28, "checkpoint": 10, "restore": 2, "eval": 10, "replay": 15,
        "exchange": 0, "down": 20 + 10 + 1,  # and the second that the second attempt had not written when it hung
    }  # fmt: skip
    assert run.seconds == pytest.approx(expected)
    assert run.seconds.keys() == ALL_BUCKETS.keys()
    assert run.goodput == pytest.approx(120 / 280)


def test_a_clock_that_is_set_amid_an_attempt_costs_no_time(tmp_path):
    """An hour forward in the first attempt, two hours back in the second."""
    folder, hour = Folder(tmp_path), 3600
    folder.event(10, "start", step=0, name="run", steps=9, generation=1)
    folder.ledger(10, 0, "init", init=10.0)
    folder.ledger(hour + 100, 5, init=10.0, compute=90.0)
    folder.launch(hour + 101, "end", 1, cause="process 1 (pid 7) was killed by signal 9")
    folder.event(hour + 130, "resume", step=4, name="run", steps=9, generation=2)
    folder.ledger(hour + 140, 4, "compile", init=20.0, compile=10.0)
    folder.ledger(200 - hour, 9, init=20.0, compile=10.0, compute=60.0)
    folder.launch(201 - hour, "end", 2, cause="process 0 (pid 8) was killed by signal 9")
    folder.event(230 - hour, "resume", step=9, name="run", steps=9, generation=3)
    folder.ledger(230 - hour, 9, "init", init=5.0)
    folder.event(231 - hour, "stop", step=9, reason="finished")
    run = read_history(tmp_path)
    assert [attempt.began - BEGAN for attempt in run.attempts] == pytest.approx([0, hour + 110, 225 - hour])
    assert run.seconds["down"] == pytest.approx(10 + 25 + 1)
    assert run.elapsed == pytest.approx(100 + 90 + 5 + 36)
    assert [attempt.generation for attempt in run.attempts] == [1, 2, None]
    assert [attempt.cause.partition(" (")[0] for attempt in run.attempts] == ["process 1", "process 0", "finished"]
    assert run.failed_generations == []
    assert [row[4] for row in tables.attempts(run)] == ["10 s", "25 s", ""]


def test_a_clock_that_is_set_between_two_attempts_on_one_machine_costs_no_time(tmp_path):
    """Set by an hour after the last record of a killed process; the machine's own seconds tell."""
    folder, hour = Folder(tmp_path), 3600
    folder.event(10, "start", step=0, name="run", steps=9)
    folder.ledger(10, 0, "init", init=10.0, boot="a", uptime=1010.0)
    folder.ledger(100, 5, init=10.0, compute=90.0, boot="a", uptime=1100.0)
    folder.event(hour + 130, "resume", step=4, name="run", steps=9)
    folder.ledger(hour + 140, 4, "compile", init=20.0, compile=10.0, boot="a", uptime=1140.0)
    assert read_history(tmp_path).seconds["down"] == pytest.approx(10)
    folder.event(hour + 200, "resume", step=4, name="run", steps=9)  # elsewhere, or after a reboot
    folder.ledger(hour + 205, 4, "compile", init=5.0, boot="b", uptime=7.0)
    assert read_history(tmp_path).seconds["down"] == pytest.approx(10 + 60)


def test_how_each_life_ended(tmp_path):
    three_attempts(tmp_path)
    run = read_history(tmp_path)
    assert [(attempt.first, attempt.last) for attempt in run.attempts] == [(0, 15), (10, 20), (20, 30)]
    killed, hung, finished = (attempt.cause for attempt in run.attempts)
    assert killed == "killed"
    assert hung == "process 1 on h1 hung in data, see hang-1.txt"
    assert finished == run.state == "finished"


def test_who_hung_counts_more_than_who_was_torn_down_by_it(tmp_path):
    folder = Folder(tmp_path)
    folder.event(0, "start", step=0, name="run")
    folder.event(50, "hang", step=3, phase="data", process=1, host="h", file="hang-1.txt")
    folder.event(51, "stop", step=3, reason="ValueError: connection closed by peer")
    assert read_history(tmp_path).state == "stopped: process 1 on h hung in data, see hang-1.txt"


def test_a_supervisor_knows_causes_and_generations_that_never_trained(tmp_path):
    folder = three_attempts(tmp_path)
    folder.launch(-1, "start", 1, processes=2)
    folder.launch(101, "end", 1, processes=2, cause="process 1 (pid 7) was killed by signal 9")
    folder.launch(102, "start", 2, processes=2)
    folder.launch(110, "end", 2, processes=2, cause="process 0 (pid 9) failed with exit code 1")
    folder.launch(119, "start", 3, processes=2)
    folder.launch(171, "end", 3, processes=2, cause="process 1 (pid 11) was hung (exit code 70)")
    folder.launch(179, "start", 4, processes=1)
    folder.launch(281, "end", 4, processes=1, cause="finished")
    folder.broken("launch.jsonl")
    run = read_history(tmp_path)
    assert [attempt.generation for attempt in run.attempts] == [1, 3, 4]
    assert run.attempts[0].cause == "process 1 (pid 7) was killed by signal 9"
    assert run.attempts[1].cause.endswith("see hang-1.txt (process 1 (pid 11) was hung (exit code 70))")
    assert run.attempts[2].cause == "finished"
    assert [event["generation"] for event in run.failed_generations] == [2]


def test_a_live_run_and_one_that_is_silent(tmp_path):
    folder = Folder(tmp_path)
    folder.event(5, "start", step=0, name="run", steps=100)
    folder.ledger(25, 7, "compute", init=5.0, compute=20.0)
    folder.broken("events.jsonl")
    folder.steps(1, 6)
    folder.broken("metrics.jsonl")
    assert read_history(tmp_path, BEGAN + 30).state == "running: training steps"
    assert read_history(tmp_path, BEGAN + 7225).state == "silent for 2:00 h: killed, or its clock differs"
    assert read_history(tmp_path, BEGAN + 30).goodput == pytest.approx(0.8)
    assert read_history(tmp_path, BEGAN + 30).step == 6


def test_a_run_without_a_ledger_has_no_goodput(tmp_path):
    folder = Folder(tmp_path)
    folder.event(0, "start", step=0, name="old")
    folder.event(50, "stop", step=3, reason="DivergedError: loss nan")
    run = read_history(tmp_path)
    assert run.goodput is None
    assert (run.seconds["down"], run.state) == (50, "stopped: DivergedError: loss nan")


def test_what_happens_as_it_should_is_no_news(tmp_path):
    """Of what checkpoints report: copies to the durable tier come as often as saves; a rollback is news."""
    folder = Folder(tmp_path)
    folder.event(0, "start", step=0, name="run")
    for event in (Committed(4, 10, 0.1, 0.0), Copied(4, "s3://b/run", 10, 0.1)):
        folder.event(1, event.kind, **event.fields())
    folder.event(2, "rollback", step=4, spike=6)
    run = read_history(tmp_path)
    assert [event["kind"] for event in run.other_events] == ["rollback"]
    assert len(run.saves) == 1


def test_attempts_that_overlap_by_a_clock_set_back_are_never_negative(tmp_path):
    folder = Folder(tmp_path)
    folder.event(5, "start", step=0, name="run")
    folder.ledger(100, 7, compute=100.0)
    folder.event(60, "resume", step=5, name="run")
    folder.ledger(90, 9, compute=40.0)
    run = read_history(tmp_path)
    assert run.seconds["down"] == 0
    assert sum(run.seconds.values()) == run.elapsed == 140


def test_series_take_numbers_as_they_are_written(tmp_path):
    folder = Folder(tmp_path)
    folder.event(0, "start", step=0, name="run")
    folder.steps(1, 3)
    folder.steps(2, 2, loss="nan")
    folder.steps(4, 4, loss=None)
    run = read_history(tmp_path)
    steps, values = zip(*run.series("loss"))
    assert steps == (1, 2, 3)
    assert math.isnan(values[1])


@pytest.mark.parametrize("write", [lambda folder: None, lambda folder: folder.broken("events.jsonl")])
def test_what_is_no_run_is_refused_in_one_line(tmp_path, write):
    write(Folder(tmp_path))
    with pytest.raises(UserError, match=r"not a run .*expected the directory that `jaxtrain train` printed"):
        read_history(tmp_path)


@pytest.mark.parametrize("line", ['{"kind": "ledger"}', "7", '{"time": "now", "kind": "start"}', "\x00\xff"])
def test_lines_of_another_kind_are_passed_over(tmp_path, line):
    folder = three_attempts(tmp_path)
    with (folder.path / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    assert read_history(tmp_path).elapsed == pytest.approx(280)


def test_fields_of_another_kind_do_no_harm(tmp_path):
    folder = three_attempts(tmp_path)
    folder.event(280, "ledger", step="x", elapsed=None, seconds={"compute": "much", "lunch": 5})
    folder.event(280, "stop", step=[], reason=None)
    read_history(tmp_path)


def test_json(tmp_path):
    three_attempts(tmp_path)
    found = json.loads(json.dumps(as_dict(read_history(tmp_path))))
    assert found["goodput"] == pytest.approx(120 / 280)
    assert [attempt["cause"] for attempt in found["attempts"]][2] == "finished"
    assert found["last"] == {"loss": pytest.approx(1 / 6), "eval/loss": 0.25, "eval/cross_entropy": 0.25}
    assert found["tokens_per_sec"] == pytest.approx(3000 / 280)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (99.4, "99 s"), (99.6, "1:39 min"), (3599.9, "59:59 min"),
     (3600, "1:00 h"), (48 * 3600, "2.0 days")],
)  # fmt: skip
def test_times_are_said_in_units_that_suit_them(seconds, expected):
    assert format_seconds(seconds) == expected


def test_a_finished_run_that_is_extended_a_day_later_was_not_down(tmp_path):
    folder = Folder(tmp_path / "run")
    for day, reason in enumerate(("finished", "SIGTERM", "finished")):
        at = 86400 * day
        folder.event(at + 10, "start" if day == 0 else "resume", step=10 * day, name="run", steps=10 * (day + 1))
        folder.ledger(at + 100, 10 * day + 10, init=10.0, compute=90.0)
        folder.event(at + 100, "stop", step=10 * day + 10, reason=reason)
    run = read_history(folder.path)
    assert run.seconds["down"] == pytest.approx(86400 - 100)  # after the signal alone
    assert run.goodput == pytest.approx(270 / (300 + 86400 - 100))
    assert [row[4] for row in tables.attempts(run)] == ["", format_seconds(86400 - 100), ""]


def test_of_a_large_file_evenly_spaced_records_are_read_and_all_validations(tmp_path: Path, monkeypatch):
    three_attempts(tmp_path)
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 1001)]
    lines[500] = json.dumps({"step": 501, "eval/loss": 7.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 1001, "lo')
    whole = read_history(tmp_path)
    monkeypatch.setattr(history, "SAMPLED_BYTES", (tmp_path / "metrics.jsonl").stat().st_size // 10)
    run = read_history(tmp_path)
    assert len(whole.metrics) == 1000
    assert 100 <= len(run.metrics) <= 103
    assert run.step == 1000
    assert run.last("loss") == 1 / 1000
    assert run.scores() == whole.scores() == {"eval/loss": [(501, 7.0)]}
    assert set(run.series("loss")) < set(whole.series("loss"))
    monkeypatch.setattr(history, "MOST_VALIDATIONS", 100)
    (tmp_path / "metrics.jsonl").write_text("\n".join(line.replace("loss", "eval/loss") for line in lines) + "\n")
    validations = read_history(tmp_path).scores()["eval/loss"]
    assert 100 < len(validations) <= 250
    assert validations[-1] == (1000, 1 / 1000)


def test_a_metric_that_rises_has_its_highest_too(tmp_path: Path):
    three_attempts(tmp_path)
    values = {4: (0.9, 0.4), 8: (0.5, 0.75), 12: (float("nan"), 0.7)}
    lines = [json.dumps({"step": step, "eval/loss": a, "eval/accuracy": b}) for step, (a, b) in values.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = {row[0]: row[1:] for row in tables.scores(read_history(tmp_path))}
    assert found["accuracy"] == ("0.4000", "0.7000", "0.4000 at 4", "0.7500 at 8")
    assert found["loss"] == ("0.9000", "0.5000", "0.5000 at 8", "0.9000 at 4")


@pytest.mark.measures
@pytest.mark.chaos
def test_a_million_steps_are_reported_within_five_seconds(tmp_path: Path):
    three_attempts(tmp_path)
    rest = dict.fromkeys(("grad_norm", "loss", "lr", "skipped", "step_time", "data_wait", "memory"), 0.123456789012)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 10**6 + 1):
            file.write(json.dumps({"step": step, "tokens_per_sec": 1e6, "tokens": step * 1000, **rest}) + "\n")
    begun = time.monotonic()
    command = [sys.executable, "-m", "jaxtrain.cli.main", "report", str(tmp_path), "--html", str(tmp_path / "r.html")]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.monotonic() - begun
    assert seconds < 5, seconds
    assert (tmp_path / "r.html").stat().st_size < 1 << 20
