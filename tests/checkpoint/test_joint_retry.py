"""Failed saves of several processes are retried by all of them at one step."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.checkpoint.multi_process_saving import JointRetry
from jaxtrain.distributed import agreed_step

WORKER = Path(__file__).parent / "saving_worker.py"


def test_two_processes_retry_together(tmp_path):
    """Runs saving_worker.py in two processes; it holds the checks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    pipes = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [[sys.executable, str(WORKER), str(port), str(index), str(tmp_path)] for index in range(2)]
    workers = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        outputs = [worker.communicate(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for out, err in outputs:
        assert "all is well" in out, err[-3000:]


class Store:
    """Key-value store as one process sees it; up to `lost` lookups in a row fail."""

    def __init__(self, notes: dict, rng: random.Random, lost: int):
        self.notes, self.rng, self.lost, self.row = notes, rng, lost, 0

    def put(self, name, text=""):
        assert name not in self.notes
        self.notes[name] = text

    def get(self, name):
        self.row = self.row + 1 if self.row < self.lost and self.rng.random() < 0.5 else 0
        return None if self.row else self.notes.get(name)


def run(seed: int, lost: int = 0, processes: int = 3, steps: int = 60) -> list[list[int]]:
    """Returns the steps at which each process retries; the first few retries are not saved.

    A process checks a step only after the others have begun the previous one, whose metrics it has read.
    """
    rng, notes = random.Random(seed), {}
    saving = [JointRetry(Store(notes, rng, lost), index == 0, 7, 7, "full", 1, 60.0) for index in range(processes)]
    asked, due, bad = [7] * processes, rng.randrange(8, 30), rng.randrange(3)
    found: list[list[int]] = [[] for _ in range(processes)]
    while min(asked) < steps:
        ready = [index for index in range(processes) if asked[index] <= min(min(asked) + 1, steps - 1)]
        index = rng.choice(ready)
        asked[index] += 1
        if index == 0 and asked[0] == due:
            saving[0]._due_time = 0.0  # the pause is over, by the clock of process 0
        if len(found[index]) <= bad and saving[index].is_due(asked[index]):
            found[index].append(asked[index])
    return found


def agree(found: list[list[int]]) -> bool:
    return bool(found[0]) and all(one == found[0] for one in found)


@pytest.mark.parametrize("lost", [0, 2])
def test_all_retry_at_the_same_steps(lost):
    assert all(agree(run(seed, lost)) for seed in range(300))


@pytest.mark.parametrize(("margin", "lost"), [(1, 0), (3, 2)])
def test_a_smaller_margin_is_not_enough(monkeypatch, margin, lost):
    monkeypatch.setattr(agreed_step, "MARGIN", margin)
    assert not all(agree(run(seed, lost)) for seed in range(300))
