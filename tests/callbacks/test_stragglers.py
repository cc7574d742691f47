"""Who is slower than the others: found from what each process says of itself, named with its host, now and then."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.callbacks.health import stragglers
from jaxtrain.callbacks.health.stragglers import EVERY, IN_A_ROW, SHARE, SILENCE, StragglerMonitor, outliers
from jaxtrain.trackers.goodput import GoodputLedger


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Shared(dict):
    """Key-value store in this process."""

    def put(self, name, text, overwrite=False):
        self[name] = text

    def entries(self):
        return dict(self)


class Machines:
    """Processes in step under one clock, each with its own wait for data; others wait for the slowest in the step."""

    def __init__(self, waits, monkeypatch):
        self.clock, store = Clock(), Shared()
        self.waits = list(waits)
        self.ledgers = [GoodputLedger(clock=self.clock) for _ in self.waits]
        for ledger in self.ledgers:
            ledger.begin("compute")
        self.paces = [StragglerMonitor(ledger, index, store) for index, ledger in enumerate(self.ledgers)]
        self.step, self.warnings, self._patch = 0, [], monkeypatch

    def run(self, seconds: int) -> list[str]:
        """A second is ten steps of 0.1 s; process 0 looks last, as it would now and then anyway."""
        for _ in range(seconds):
            for _ in range(10):
                self.step += 1
                begun = self.clock.now
                for ledger, wait in zip(self.ledgers, self.waits):
                    self.clock.now = begun
                    with ledger.phase("data"):
                        self.clock.now = begun + wait
                    ledger.begin_step(self.step)
                self.clock.now = begun + 0.1
            for index in reversed(range(len(self.paces))):
                self._patch.setattr(socket, "gethostname", lambda index=index: f"host{index}")
                self.paces[index]()
        found = [text for one in self.paces for text in one.poll()]
        self.warnings += found
        return found


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_process_that_waits_for_its_data_is_named_with_its_host(count, monkeypatch):
    waits = [0.001 * index for index in range(count)]
    waits[-1] = 0.06
    (said,) = Machines(waits, monkeypatch).run(EVERY * (IN_A_ROW + 2))
    assert said.startswith(f"straggler: process {count - 1} on host{count - 1} waits for data 0.06 s a step")


def test_processes_that_are_alike_are_not_named(monkeypatch):
    rng = np.random.default_rng(0)
    machines = Machines(np.full(8, 0.01), monkeypatch)
    for _ in range(20):
        machines.waits = list(0.01 + 0.002 * rng.random(8))
        assert machines.run(EVERY) == []


def test_what_passes_is_not_named(monkeypatch):
    machines = Machines([0.0, 0.0, 0.0], monkeypatch)
    for _ in range(10):
        machines.waits[2] = 0.09 - machines.waits[2]  # every other word
        assert machines.run(EVERY) == []


def test_it_is_said_again_after_a_while_only(monkeypatch):
    machines = Machines([0.0, 0.0, 0.09], monkeypatch)
    words = 2 + IN_A_ROW + SILENCE + IN_A_ROW
    machines.run(EVERY * words)
    assert len(machines.warnings) == 2


def test_a_step_that_does_not_end_says_nothing_new(monkeypatch):
    machines = Machines([0.0, 0.0, 0.09], monkeypatch)
    machines.run(EVERY * 2)  # one word of each
    for _ in range(EVERY * 20):
        for one in machines.paces:
            one()
    assert machines.run(0) == []


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=50), st.floats(1.1, 100))
def test_outliers_against_numpy(values, factor):
    """The rule in NumPy, on an odd number, where every model_def of the median agrees."""
    values = values if len(values) % 2 else values[1:]
    values[0] *= factor
    middle = np.median(values)
    spread = 1.4826 * np.median(np.abs(np.array(values) - middle))
    least = SHARE * middle
    expected = [i for i, v in enumerate(values) if v - middle > max(stragglers.OUTLIER * spread, least)]
    assert outliers(dict(enumerate(values)), least) == expected


TALK = """
import sys, time
import jax
from jaxtrain.distributed.kv_store import KeyValueStore
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
store = KeyValueStore("test")
for word in ("first", "second"):
    store.put(sys.argv[2], word, overwrite=True)
until = time.monotonic() + 30
while store.entries() != {"0": "second", "1": "second"}:
    assert time.monotonic() < until, store.entries()
    time.sleep(0.02)
"""


def test_two_processes_share_a_store():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    running = [
        subprocess.Popen([sys.executable, "-c", TALK, address, str(index)], env=environment, stderr=subprocess.PIPE)
        for index in range(2)
    ]
    for process in running:
        assert process.communicate(timeout=90)[1] is not None
        assert process.returncode == 0
