"""Runs that are really killed, through the command line: resume twice, bitwise; signals; refusals."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("resume")  # one undisturbed run for all
CONFIG = """
name: run
dir: {dir}/runs
simulate: 4
steps: 40
precision: bf16
layout: fsdp
mesh: {{data: 2, fsdp: 2}}
model: {{embed: 32, layers: 2, heads: 2, mlp: 64}}
data:
  sources: [{{path: {dir}/corpus}}]
  sequence: 64
  global_batch: 8
  validation_fraction: 0.1
  cache_dir: {dir}/cache
  workers: 1
optimizer: {{lr: 1.0e-3}}
schedule: {{warmup_steps: 2}}
checkpoint: {{every: 3}}
eval: {{every: 8, batches: 1}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("resume")
    (place / "corpus").mkdir()
    rng = random.Random(1)
    for index in range(200):
        text = " ".join(rng.choice("abcdefgh") * rng.randint(1, 9) for _ in range(rng.randint(10, 300)))
        (place / "corpus" / f"{index}.txt").write_text(text)
    (place / "config.yaml").write_text(CONFIG.format(dir=place))
    return place


def start(place: Path, *arguments: str, stderr: int | None = subprocess.STDOUT, **environ: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | environ
    command = [sys.executable, "-m", "jaxtrain.cli.main", *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    return subprocess.Popen(command, cwd=place, env=environment, **pipes)


def finish(process: subprocess.Popen, expected: int = 0) -> str:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == expected, output
    return output


def losses(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def until(process: subprocess.Popen, run: Path, step: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Waits until a run has logged a step."""
    deadline = time.monotonic() + 240
    while not (run / "metrics.jsonl").exists() or max(losses(run), default=0) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not get on"
        meanwhile()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[int, float]:
    finish(start(place, "train", "config.yaml", "name=whole"))
    found = losses(place / "runs/whole")
    assert list(found) == list(range(1, 41))
    return found


def test_killed_twice_and_resumed_is_bitwise_the_same(place: Path, whole: dict[int, float]):
    run = place / "runs/killed"
    process = start(place, "train", "config.yaml", "name=killed")
    for step in (7, 17):
        until(process, run, step)
        process.kill()
        process.wait()
        process = start(place, "resume", "runs/killed")
    output = finish(process)
    assert "losses are bitwise those of an uninterrupted run" in output
    assert losses(run) == whole


@pytest.mark.parametrize(("option", "environ"), [(["--resume=auto"], {}), ([], {"SLURM_JOB_ID": "7"})])
def test_a_scheduler_runs_the_same_line_again(
    place: Path, whole: dict[int, float], option: list[str], environ: dict[str, str]
):
    run = place / f"runs/again-{len(option)}"
    line = ("train", "config.yaml", f"name={run.name}", *option)
    for step in (7, 17):
        process = start(place, *line, **environ)
        until(process, run, step)
        process.kill()
        process.wait()
    finish(start(place, *line, **environ))
    assert losses(run) == whole
    output = finish(start(place, *line, "seed=1", **environ), 2)
    assert "seed: 0 -> 1; expected the config of the run there" in output
    assert not run.with_name(f"{run.name}-2").exists()


def test_sigterm_saves_and_says_so_with_its_exit_code(place: Path, whole: dict[int, float]):
    run = place / "runs/stopped"
    process = start(place, "train", "config.yaml", "name=stopped", "checkpoint.every=null")
    until(process, run, 5)
    process.send_signal(signal.SIGTERM)
    output = finish(process, 75)
    assert "resume runs/stopped" in output.replace(f"{place}/", "")
    saved = [int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()]
    assert len(saved) == 1
    assert saved[0] >= 5
    finish(start(place, "resume", "runs/stopped"))
    assert losses(run) == whole


@pytest.mark.parametrize("gone", ["stdout", "both"])
def test_a_run_goes_on_without_the_reader_of_its_output(place: Path, whole: dict[int, float], gone: str):
    """As in `jaxtrain train ... | head -1`."""
    process = start(
        place, "train", "config.yaml", f"name=unread-{gone}", stderr=None if gone == "stdout" else subprocess.STDOUT
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    assert losses(place / f"runs/unread-{gone}") == whole


def test_sigusr1_saves_and_the_run_goes_on(place: Path, whole: dict[int, float]):
    run = place / "runs/asked"
    process = start(place, "train", "config.yaml", "name=asked", "checkpoint.every=null", "checkpoint.keep=9")
    for step in (5, 15):
        until(process, run, step)
        process.send_signal(signal.SIGUSR1)
    finish(process)
    assert losses(run) == whole
    saved = sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    assert len(saved) == 3
    assert 5 <= saved[0] < 15 <= saved[1] < saved[2] == 40


@pytest.mark.usefixtures("default_hangup")
def test_a_closed_terminal_saves(place: Path, whole: dict[int, float]):
    """The run gets SIGHUP, and can no longer write to the terminal."""
    run, (terminal, inner) = place / "runs/hangup", os.openpty()
    os.set_blocking(terminal, False)
    command = [sys.executable, "-m", "jaxtrain.cli.main", "train", "config.yaml", "name=hangup"]
    process = subprocess.Popen(
        [*command, "checkpoint.every=null"], cwd=place, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inner)

    def read_terminal() -> None:
        with suppress(BlockingIOError):
            os.read(terminal, 4096)

    until(process, run, 5, read_terminal)
    os.close(terminal)
    assert process.wait(120) == 75
    finish(start(place, "resume", "runs/hangup"))
    assert losses(run) == whole


def test_what_cannot_be_resumed_is_refused_in_one_line(place: Path, whole: dict[int, float]):
    output = finish(start(place, "resume", "runs/whole", "model.embed=64", "steps=50"), 2)
    lines = [line for line in output.splitlines() if line.strip()]
    assert any("model.embed: 32 -> 64" in line or "does not fit this model" in line for line in lines), output
    assert "Traceback" not in output


def test_eval_and_generate_read_a_run(place: Path, whole: dict[int, float]):
    shown = json.loads(finish(start(place, "eval", "runs/whole")).splitlines()[-1])
    assert shown["step"] == 40
    evals = [json.loads(line) for line in (place / "runs/whole/metrics.jsonl").read_text().splitlines()]
    logged = [r["eval/loss"] for r in evals if "eval/loss" in r][-1]
    assert shown["eval/loss"] == pytest.approx(logged, rel=1e-6)
    options = ["--prompt", "aaa ", "--tokens", "8", "--temperature", "0"]
    one = finish(start(place, "generate", "runs/whole", *options))
    other = finish(start(place, "generate", "runs/whole", *options, "layout=ddp", "--simulate", "1"))
    assert one.startswith("aaa ")
    assert len(one) > 5
    assert one == other


def test_a_run_that_is_being_written_is_not_resumed(place: Path):
    run = place / "runs/busy"
    process = start(place, "train", "config.yaml", "name=busy", "steps=2000")
    until(process, run, 3)
    output = finish(start(place, "resume", "runs/busy"), 2)
    assert "Traceback" not in output
    process.kill()
    process.wait()
