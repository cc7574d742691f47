"""The watchdog: ends what hangs, with its stacks, and nothing that works, was stopped or is debugged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from jaxtrain.callbacks.health import watchdog as watch
from jaxtrain.exit_codes import HUNG
from jaxtrain.hlo.collectives import count_collectives, totals_by_axes
from jaxtrain.io import watchdog
from jaxtrain.io.ticker import Ticker
from jaxtrain.io.watchdog import DEADLINES, MIN_STEP_DEADLINE, Watchdog
from jaxtrain.trackers.goodput import BUCKETS, GoodputLedger


class Ended(Exception):
    """Stands for the end of the process."""


def end(code: int) -> None:
    assert code == HUNG
    raise Ended


def make(tmp_path: Path, **options):
    ledger, events = GoodputLedger(), []
    dog = Watchdog(ledger, tmp_path, lambda kind, **fields: events.append((kind, fields)), exit_process=end, **options)
    return ledger, dog, events


def ticks_to_end(dog: Watchdog, most: int = 100_000) -> int:
    for tick in range(most):
        try:
            dog()
        except Ended:
            return tick
    return most


@pytest.fixture(autouse=True)
def _not_debugged(monkeypatch):
    monkeypatch.setattr(watchdog, "is_debugged", lambda: False)


@pytest.mark.parametrize("phase", sorted(DEADLINES))
def test_every_phase_has_a_deadline_of_its_own(tmp_path, phase, capfd):
    ledger, dog, events = make(tmp_path)
    ledger.begin(phase)
    assert ticks_to_end(dog) == pytest.approx(DEADLINES[phase], abs=2)
    ((kind, fields),) = events
    assert (kind, fields["phase"], fields["file"]) == ("hang", phase, "hang-0.txt")
    assert "process 0 on" in capfd.readouterr().err


def test_no_phase_is_forgotten():
    assert watchdog.PHASE_DESCRIPTIONS.keys() == BUCKETS.keys() == {*DEADLINES, "compute", "replay"}


def test_what_compiles_a_large_model_is_left_alone_for_two_hours():
    assert min(DEADLINES[phase] for phase in ("compile", "eval", "restore")) >= 7200


def test_a_step_may_take_many_times_what_steps_took(tmp_path):
    ledger, dog, _ = make(tmp_path)
    ledger.step_time = lambda: None
    assert dog.deadline("compute") == 3600
    ledger.step_time = lambda: 0.1
    assert dog.deadline("compute") == dog.deadline("replay") == MIN_STEP_DEADLINE
    ledger.step_time = lambda: 60.0
    assert dog.deadline("compute") == 20 * 60


def test_a_given_deadline_is_that_of_a_step_and_of_its_data_alone(tmp_path):
    _, dog, _ = make(tmp_path, limit=30.0)
    assert {phase: dog.deadline(phase) for phase in ("compute", "data")} == {"compute": 30, "data": 30}
    assert dog.deadline("compile") == DEADLINES["compile"]
    assert make(tmp_path, limit=9999.0)[1].deadline("eval") == 9999
    ledger, never, _ = make(tmp_path, limit=0.0)
    ledger.begin("data")
    assert ticks_to_end(never, 20_000) == 20_000


def test_of_several_processes_the_one_whose_data_hangs_ends_first(tmp_path):
    """The others wait for it, in a step."""
    ledger, waits, _ = make(tmp_path, processes=2, process=1)
    ledger.step_time = lambda: 0.1
    ledger.begin("compute")
    other, culprit, _ = make(tmp_path, processes=2)
    other.begin("data")
    assert ticks_to_end(culprit) + MIN_STEP_DEADLINE / 2 < ticks_to_end(waits)


def test_every_change_starts_the_count_anew(tmp_path):
    ledger, dog, _ = make(tmp_path, limit=5.0)
    ledger.begin("compute")
    for step in range(20):
        for _ in range(4):
            dog()
        if step % 2:
            ledger.begin_step(step)
        else:
            with ledger.phase("data"):
                pass
    assert ticks_to_end(dog) <= 7


def test_a_debugger_stops_the_count(tmp_path, monkeypatch):
    ledger, dog, _ = make(tmp_path, limit=5.0)
    ledger.begin("data")
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "is_debugged", lambda: True)
        assert ticks_to_end(dog, 100) == 100
    assert ticks_to_end(dog) < 10


def test_a_python_debugger_is_seen(monkeypatch):
    monkeypatch.undo()  # the fixture's patch too
    assert not watchdog.is_debugged()
    seen = {"being_debugged": watchdog.is_debugged, "__name__": "pdb"}
    exec("def interaction():\n    return being_debugged()", seen)
    assert seen["interaction"]()


def test_the_end_comes_even_if_nothing_can_be_written(tmp_path, capfd):
    ledger, dog, _ = make(tmp_path / "nowhere", limit=3.0, describe_program=lambda: 1 / 0)
    ledger.begin("compute")
    assert ticks_to_end(dog) < 10
    assert "hangs in a step" in capfd.readouterr().err


def test_the_end_comes_even_if_what_is_written_hangs_too(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "WRITE_TIMEOUT", 0.1)
    ledger, dog, _ = make(tmp_path, limit=3.0, describe_program=lambda: time.sleep(60) or [])
    dog._log_event = lambda *_, **__: time.sleep(60)
    ledger.begin("compute")
    begun = time.monotonic()
    assert ticks_to_end(dog) < 10
    assert time.monotonic() - begun < 30
    assert "most recent call first" in (tmp_path / "hang-0.txt").read_text()


def test_one_call_that_waits_holds_up_no_other():
    """A watchdog beside a dead disk."""
    ticks, waits = [], threading.Event()
    ticker = Ticker(waits.wait, lambda: ticks.append(1), period=0.01)
    until = time.monotonic() + 20
    while len(ticks) < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    waits.set()
    ticker.close()


def test_a_call_that_fails_is_left_out_and_said(capfd):
    ticks = []
    ticker = Ticker(lambda: 1 / 0, lambda: ticks.append(1), period=0.01)
    until = time.monotonic() + 20
    while len(ticks) < 5:
        assert time.monotonic() < until
        time.sleep(0.01)
    ticker.close()
    assert capfd.readouterr().err.count("training continues: division by zero") == 1


STOPPED = """
import time, sys
from pathlib import Path
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.io import watchdog
from jaxtrain.io.ticker import Ticker
from jaxtrain.io.watchdog import Watchdog
ledger = GoodputLedger()
ticker = Ticker(Watchdog(ledger, Path(sys.argv[1]), print, limit=0.6, period=0.05), period=0.05)
with ledger.phase("data"):
    print("ready", flush=True)
    time.sleep(float(sys.argv[2]))
ticker.close()
"""


@pytest.mark.parametrize(("sleep", "code"), [(0.4, 0), (60, HUNG)])
def test_a_stopped_process_that_goes_on_is_not_ended(tmp_path, sleep, code):
    """The time in which it stood still is none in which it did nothing."""
    command = [sys.executable, "-c", STOPPED, str(tmp_path), str(sleep)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if not code:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err


def test_the_collectives_of_the_running_step_are_named(tmp_path):
    from jaxtrain.config import Config
    from jaxtrain.core.program import build_program

    options = {"type": "linear_model:Linear", "options": {"size": 8}}
    config = Config(model=options, mesh={"data": 4, "fsdp": 2}, rules={"batch": ["data", "fsdp"], "features": "fsdp"})
    import linear_model

    program = build_program(config, None, jax.devices()[:8])
    state = program.init()
    batch = {name: jax.numpy.asarray(rows) for name, rows in linear_model.batch(8, 8).items()}
    jax.block_until_ready(program.step(state, batch))
    found = "\n".join(watch.step_collectives(program))  # and of other tests' steps
    assert "collectives of a step" in found
    expected = totals_by_axes(
        count_collectives(
            program.step.lower(program.init(), batch).compile().as_text(), dict(program.sharder.mesh.shape)
        )
    )
    assert expected
    lines = [f"  {op} over {axes}: {count:,}" for (axes, op), (count, _) in expected.items()]
    assert "\n".join(["in:", *lines]) in found


HANGING = """
import threading
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain.nn.env import constant

class Line(nnx.Module):
    def __init__(self, *, env, rngs):
        self.env = env
        self.w = env.param(rngs, (None,), (4,), constant(0.0))

    def loss(self, batch, key):
        return {"square": (jnp.sum((batch["x"] @ self.env.weight(self.w)) ** 2), jnp.float32(len(batch["x"])))}

class Rows:
    def __init__(self, split, seed, global_batch):
        self.rows = global_batch

    def batch(self, step, rows=None):
        if step == 5:
            read_from_a_dead_disk()
        return {"x": np.ones((self.rows, 4), np.float32)[rows]}

def read_from_a_dead_disk():
    threading.Event().wait()
"""


def test_a_run_whose_data_hang_ends_and_says_where(tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "c.yaml").write_text(
        "{dir: runs, simulate: 1, steps: 9, precision: fp32, model: {type: 'hanging:Line'}, "
        "data: {type: 'hanging:Rows', global_batch: 4}, checkpoint: {every: 2}}"
    )
    command = [sys.executable, "-m", "jaxtrain.cli.main", "train", "c.yaml", "--deadline", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == HUNG, done.stdout + done.stderr
    assert "hangs waiting for data: no progress for 4 s (deadline 3 s); last step begun: 5" in done.stderr
    text = (tmp_path / "runs/run/hang-0.txt").read_text()
    named = re.search(r"Thread (0x[0-9a-f]+) is prefetch", text)
    assert named is not None
    loader = text.partition(f"Thread {named[1]} (most recent call first)")[2].partition("\nThread ")[0]
    assert "in read_from_a_dead_disk" in loader
    assert "in fit" in text  # the main thread's
    events = [json.loads(line) for line in (tmp_path / "runs/run/events.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "hang"
    assert (events[-1]["phase"], events[-1]["step"]) == ("data", 5)
    assert next(event for event in reversed(events) if event["kind"] == "ledger")["phase"] == "data"
