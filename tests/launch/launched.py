"""Real runs in real processes, started and looked at from outside, and the undisturbed run to compare them with."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from recorded_data import recorded

HERE = Path(__file__).parent
ROWS = 24
CONFIG = """
name: {name}
dir: {place}/runs
simulate: 8
steps: {steps}
precision: fp32
layout: fsdp
model: {{embed: 48, layers: 1, heads: 4, mlp: 96}}
data:
  type: recorded_data:Recorded
  options: {{corpus: {place}/corpus, cache: {place}/cache, sequence: 32, folder: {place}/{name}, delay: {delay}}}
  sequence: 32
  global_batch: 24
optimizer: {{lr: 1.0e-3}}
schedule: {{warmup_steps: 2}}
checkpoint: {{every: 3}}
log: {{tensorboard: false, peak_tflops: 1}}
"""


def write(place: Path, name: str, steps: int, delay: float = 0.0) -> str:
    (place / name).mkdir()
    file = place / f"{name}.yaml"
    file.write_text(CONFIG.format(place=place, name=name, steps=steps, delay=delay))
    return str(file)


def undisturbed(place: Path, steps: int) -> dict[int, float]:
    """One process of its own, eight devices: its losses."""
    (place / "corpus").mkdir()
    rng = random.Random(1)
    for index in range(60):
        (place / "corpus" / f"{index}.txt").write_text("".join(rng.choices("abcdef ", k=rng.randint(50, 400))))
    config = write(place, "whole", steps)
    command = [sys.executable, "-m", "jaxtrain.cli.main", "train", config]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return losses(place / "runs" / "whole")


def environment(**own: str) -> dict[str, str]:
    """The test's and `own`, without its number of simulated devices, in which the recorded data can be imported."""
    base = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"} | own
    return base | {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), base.get("PYTHONPATH", "")]))}


def losses(run: Path) -> dict[int, float]:
    """Step -> loss; each step is there once."""
    if not (run / "metrics.jsonl").exists():
        return {}
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    found = [record for record in map(json.loads, filter(lambda line: line.endswith("\n"), lines)) if "loss" in record]
    assert len({record["step"] for record in found}) == len(found)
    return {record["step"]: record["loss"] for record in found}


def listening(pid: int) -> list[str]:
    """Addresses on which a process listens, as /proc/net/tcp has them: hexadecimal, in the machine's byte order."""
    inodes = {os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(f)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    found = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    assert found, "a process of a run listens for its peers"
    return found


def is_loopback(address: str) -> bool:
    """127.0.0.1, as IPv4 or mapped into IPv6, or ::1."""
    return address in ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def free_address() -> str:
    """Of this machine, where nobody listens just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Launched:
    """Supervisors of one run, started here, and what it has written."""

    def __init__(self, place: Path, steps: int, delay: float) -> None:
        self.place, self.run = place, place / "runs" / "parts"
        self.config = write(place, "parts", steps, delay)
        self.supervisors: list[subprocess.Popen] = []
        self.watched: subprocess.Popen | None = None  # must live while something is waited for; default: the first

    def start(self, *arguments: str, inside: Sequence[str] = (), **environ: str) -> subprocess.Popen:
        """Starts a supervisor; `inside` begins its command line."""
        base = environment(**environ)
        command = [*inside, sys.executable, "-m", "jaxtrain.cli.main", "launch", *arguments]
        out = open(self.place / f"terminal-{len(self.supervisors)}", "wb")  # noqa: SIM115
        process = subprocess.Popen(command, cwd=self.place, env=base, stdout=out, stderr=subprocess.STDOUT)
        out.close()
        self.supervisors.append(process)
        return process

    def terminal(self) -> str:
        return "".join((self.place / f"terminal-{i}").read_text() for i in range(len(self.supervisors)))

    def until(self, true: Callable[[], bool], what: str) -> None:
        deadline, watched = time.monotonic() + 240, self.watched or self.supervisors[0]
        while not true():
            assert watched.poll() is None, self.terminal()
            assert time.monotonic() < deadline, f"{what}\n{self.terminal()}"
            time.sleep(0.01)

    def reaches(self, step: int) -> None:
        self.until(lambda: max(losses(self.run), default=0) >= step, f"step {step} is not reached")

    def events(self, kind: str) -> list[dict]:
        path = self.run / "launch.jsonl"
        return [r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == kind] if path.exists() else []

    def workers(self) -> dict[int, int]:
        """Process -> pid of this run's living workers."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                command = (folder / "cmdline").read_text()
                if "jaxtrain.cli.worker" not in command or str(self.run) not in command:
                    continue
                env = (folder / "environ").read_text().split("\0")
            except (OSError, ValueError):
                continue
            found[next(int(e.partition("=")[2]) for e in env if e.startswith("JAX_PROCESS_ID="))] = int(folder.name)
        return found

    def leader(self, supervisor: subprocess.Popen) -> int:
        """Process of the leader beside an agent."""
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        return next(int(pid) for pid in children if "jaxtrain.cli.leader" in Path(f"/proc/{pid}/cmdline").read_text())

    def as_expected(self, expected: dict[int, float]) -> None:
        """The losses of the undisturbed run, its token ids, and nothing left behind."""
        got = losses(self.run)
        assert sorted(got) == sorted(expected)
        assert [got[step] for step in sorted(got)] == pytest.approx([expected[step] for step in sorted(got)], rel=1e-5)
        ids, whole = recorded(self.place / "parts"), recorded(self.place / "whole")
        trained = {(step, row) for step in range(len(expected)) for row in range(ROWS)}
        assert {key: ids[key] for key in trained} == {key: whole[key] for key in trained}
        assert self.workers() == {}
        left = [name for name in os.listdir(self.run / "checkpoints") if not name.startswith(".")]
        assert all(name.isdecimal() for name in left), left

    def close(self) -> None:
        for process in self.supervisors:
            process.kill()
            process.wait(10)
