"""Processes that hang, are stopped or cannot be heard: whoever waits for them ends, and the run goes on as if not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from faults import override
from launched import Launched, free_address, losses, undisturbed

from jaxtrain.exit_codes import HUNG

STEPS = 9
LOCAL = ("local", "--processes=2", "--devices-per-process=2", "--deadline=5")


def hung(job: Launched) -> list[tuple[int, str]]:
    """(process, phase) of the watchdogs' events."""
    records = map(json.loads, (job.run / "events.jsonl").read_text().splitlines())
    return [(record["process"], record["phase"]) for record in records if record["kind"] == "hang"]


def state(pid: int) -> str:
    """R, S, T, ... of a process; empty where it is gone, Z where only its parent has not noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def ends_once(tmp_path: Path, job: Launched, *overrides: str) -> dict:
    """The end of the first of two generations, after which the run is the undisturbed one."""
    expected = undisturbed(tmp_path, STEPS)
    local = job.start(*LOCAL, job.config, *overrides)
    assert local.wait(240) == 0, job.terminal()
    job.as_expected(expected)
    first, last = job.events("end")
    assert (last["cause"], last["processes"]) == ("finished", 2)
    return first


@pytest.mark.chaos
def test_a_worker_that_hangs_ends_and_the_next_generation_finishes(tmp_path: Path, launched):
    """Its data do; the other waits for it in a step, and longer."""
    job = launched(STEPS)
    first = ends_once(tmp_path, job, override("hang@data:5/1"))
    assert first["code"] == HUNG
    assert first["cause"].startswith("process 1 (pid ")
    assert first["cause"].endswith(" was hung (exit code 70)")
    assert hung(job) == [(1, "data")]
    assert "in _hang" in (job.run / "hang-1.txt").read_text()  # the loader's thread


@pytest.mark.chaos
def test_a_worker_that_hangs_in_a_step_holds_its_peers_no_longer_than_the_deadline(tmp_path: Path, launched):
    """Both wait then, and either may be the first to end."""
    job = launched(STEPS)
    first = ends_once(tmp_path, job, override("hang@5/0"))
    assert first["code"] == HUNG
    assert {phase for _, phase in hung(job)} == {"compute"}


@pytest.mark.chaos
@pytest.mark.parametrize("process", [0, 1])
def test_the_peers_of_a_stopped_worker_end_the_generation(tmp_path: Path, launched, process: int):
    """SIGSTOP: it notices nothing itself, and is killed as it stands."""
    job = launched(STEPS)
    first = ends_once(tmp_path, job, override(f"stop@5/{process}"))
    assert hung(job) == [(1 - process, "compute")]
    assert first["code"] == HUNG
    assert first["cause"].startswith(f"process {1 - process} (pid ")


@pytest.mark.chaos
def test_what_comes_after_a_step_comes_again_after_a_death_amid_it(tmp_path: Path, launched):
    """With states in memory too, from which the run goes on later than from a checkpoint: validation, the last save."""
    expected = undisturbed(tmp_path, STEPS)
    job = launched(STEPS)
    faults = override("kill@eval:3/0", "kill@eval:6/1", f"kill@commit:{STEPS}/0")
    local = job.start(*LOCAL, "--memory=1", job.config, faults, "eval.every=3", "eval.batches=1")
    assert local.wait(240) == 0, job.terminal()
    job.as_expected(expected)
    metrics = map(json.loads, (job.run / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in metrics if "eval/loss" in record] == [3, 6, 9]
    assert len((job.run / "faults.jsonl").read_text().splitlines()) == 3
    assert str(STEPS) in os.listdir(job.run / "checkpoints")


@pytest.mark.chaos
@pytest.mark.parametrize("is_whole", [False, True], ids=["agent", "node"])
def test_a_node_that_is_not_heard_of_is_left_behind_and_joins_again(tmp_path: Path, launched, is_whole: bool):
    """SIGSTOP of the agent of node 1, alone or with its worker: fenced, and let go on when the others have gone on."""
    steps = 60
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.25)
    common = ("node", "--nodes=2", "--processes=1", "--devices-per-process=2", "--heartbeat=3", "--join-timeout=30")
    common = (*common, f"--coordinator={free_address()}", job.config)
    nodes = [job.start(*common, f"--node={i}") for i in range(2)]
    job.reaches(5)
    worker = job.workers()[1]
    if is_whole:
        os.kill(worker, signal.SIGSTOP)
    nodes[1].send_signal(signal.SIGSTOP)
    job.until(lambda: len(job.events("start")) == 2, "the leader does not go on alone")
    job.reaches(max(losses(job.run)) + 4)
    if is_whole:
        os.kill(worker, signal.SIGCONT)
    nodes[1].send_signal(signal.SIGCONT)
    job.until(lambda: state(worker) == "", "the fenced worker is not ended")
    job.until(lambda: len(job.events("start")) == 3, "the fenced agent does not join again")
    assert [node.wait(240) for node in nodes] == [0, 0], job.terminal()
    job.as_expected(expected)
    assert [start["processes"] for start in job.events("start")] == [2, 1, 2]
    assert [end["cause"].replace(" (127.0.0.1)", "") for end in job.events("end")] == [
        "node 1 is lost: it gave no sign of life for 3 s",
        "node 1 joined: continuing with 2 processes",
        "finished",
    ]
