"""Real runs in real processes that are killed, shrunk and grown: the losses and token ids of an undisturbed one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from launched import free_address, is_loopback, listening, losses, undisturbed


def test_a_killed_process_costs_nothing_but_time(tmp_path: Path, launched):
    steps = 16
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.05)
    local = job.start("local", "--processes=2", "--devices-per-process=2", job.config)
    job.reaches(3)
    os.kill(job.leader(local), signal.SIGKILL)
    job.until(lambda: bool(job.events("adopted")), "the generation is not adopted")
    job.reaches(7)
    killed = job.workers()[1]
    assert all(map(is_loopback, [a for pid in job.workers().values() for a in listening(pid)]))
    assert all(map(is_loopback, listening(job.leader(local))))
    os.kill(killed, signal.SIGKILL)
    assert local.wait(240) == 0, job.terminal()
    job.as_expected(expected)
    end, last = job.events("end")
    assert end["cause"] == f"process 1 (pid {killed}) was killed by signal 9"
    assert last["cause"] == "finished"
    assert [start["mesh"] for start in job.events("start")] == ["fsdp 4", "fsdp 4"]
    assert f"generation 1 ended after {end['seconds']:.1f} s: {end['cause']}" in job.terminal()
    resumed = json.loads((job.run / "events.jsonl").read_text().splitlines()[-1])
    assert resumed["kind"] == "stop"


def test_a_lost_node_costs_a_step_and_no_disk(tmp_path: Path, launched):
    steps = 14
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.1)
    common = ("node", "--nodes=2", "--processes=1", "--devices-per-process=2", "--memory=1")
    common = (*common, f"--coordinator={free_address()}", job.config, "checkpoint.every=null")
    nodes = [job.start(*common, f"--node={i}") for i in range(2)]
    job.reaches(6)
    nodes[1].kill()
    assert nodes[0].wait(240) == 0, job.terminal()
    job.as_expected(expected)
    assert [(start["processes"], start["mesh"]) for start in job.events("start")] == [(2, "fsdp 4"), (1, "fsdp 2")]
    assert job.events("end")[0]["step"] is None  # no checkpoint was there
    events = [json.loads(line) for line in (job.run / "events.jsonl").read_text().splitlines()]
    (resumed,) = [event for event in events if event["kind"] == "resume"]
    assert resumed["restored"] == "the memory of the nodes"
    assert resumed["step"] >= 6 - 1
    assert resumed.get("cut", 0) <= 1  # logged steps that are made again


@pytest.mark.chaos
def test_nodes_are_lost_and_join_8_4_6_8_devices(tmp_path: Path, launched):
    steps = 60
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.25)
    common = (
        "node",
        "--nodes=4",
        f"--coordinator={free_address()}",
        "--processes=1",
        "--devices-per-process=2",
        job.config,
    )
    nodes = [job.start(*common, f"--node={i}") for i in range(4)]
    job.reaches(5)
    nodes[3].kill()
    nodes[2].kill()

    def grown(count: int) -> None:
        job.until(lambda: job.events("start")[-1]["processes"] == count, f"no generation of {count} processes")
        job.reaches(max(losses(job.run)) + 4)

    grown(2)
    nodes[2] = job.start(*common, "--node=2")
    grown(3)
    nodes[3] = job.start(*common, "--node=3")
    grown(4)
    assert [node.wait(240) for node in nodes] == [0] * 4, job.terminal()
    job.as_expected(expected)
    sizes = [(start["processes"], start["devices"]) for start in job.events("start")]
    assert [size for size, before in zip(sizes, [None, *sizes]) if size != before] == [(4, 8), (2, 4), (3, 6), (4, 8)]


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_saves_all_at_one_step_and_the_run_goes_on(tmp_path: Path, launched, number: int):
    steps = 16
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.05)
    local = job.start("local", "--processes=2", "--devices-per-process=2", job.config)
    job.reaches(4)
    os.kill(job.workers()[1] if number == signal.SIGTERM else local.pid, number)
    assert local.wait(240) == 75, job.terminal()
    (end,) = job.events("end")
    assert end["step"] == max(losses(job.run)) < steps
    local = job.start("local", "--processes=1", "--devices-per-process=3", str(job.run))
    assert local.wait(240) == 0, job.terminal()
    job.as_expected(expected)


def test_sigusr1_saves_at_one_step_and_training_goes_on(tmp_path: Path, launched):
    """Sent to the launcher while its workers start, where it does nothing, and while they train."""
    steps = 60
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.05)
    local = job.start("local", "--processes=2", "--devices-per-process=2", job.config, "checkpoint.every=null")
    job.until(lambda: len(job.workers()) == 2, "no two workers")
    local.send_signal(signal.SIGUSR1)
    job.reaches(5)
    local.send_signal(signal.SIGUSR1)
    committed = job.run / "checkpoints"
    job.until(lambda: any(path.name.isdecimal() for path in committed.iterdir()), "no checkpoint")
    (saved,) = [int(path.name) for path in committed.iterdir() if path.name.isdecimal()]
    assert 5 < saved < steps
    assert local.wait(240) == 0, job.terminal()
    job.as_expected(expected)
    assert len(job.events("start")) == 1


def test_a_signal_in_the_last_moment_of_a_run_hangs_nobody(tmp_path: Path, launched):
    """It comes when the last step is done: JAX's preemption service would wait 60 s for a process that has left it."""
    (tmp_path / "corpus").mkdir()
    for index in range(20):
        (tmp_path / "corpus" / f"{index}.txt").write_text("abc def " * 50)
    job = launched(6)
    local = job.start("local", "--processes=2", "--devices-per-process=2", job.config)
    job.reaches(6)
    time.sleep(0.1)
    for pid in job.workers().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert local.wait(40) in (0, 75), job.terminal()


@pytest.mark.chaos
def test_the_same_line_ten_times_after_everything_was_killed(tmp_path: Path, launched):
    """As a scheduler does that ends all processes of a job and starts it again."""
    steps, rng = 60, random.Random(5)
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.1)
    line = ("local", "--processes=2", "--devices-per-process=2", job.config)
    for index in range(10):
        job.watched = local = job.start(*line)
        if index % 3:
            job.reaches(min(max(losses(job.run), default=0) + rng.randint(1, 6), steps))
        else:
            time.sleep(rng.uniform(0, 8))  # amid the start
        local.kill()
        local.wait()
        while job.workers():
            time.sleep(0.05)
    local = job.start(*line)
    assert local.wait(240) == 0, job.terminal()
    job.as_expected(expected)
    assert [path.name for path in job.run.parent.iterdir() if path.name.startswith("parts")] == ["parts"]
