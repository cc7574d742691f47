"""Saves that fail, are slow or hang: retried in the background, reported in one line, earlier ones untouched."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import (
    Checkpointer,
    CheckpointReader,
    CheckpointStore,
    Committed,
    Retrying,
    SaveFailed,
    SlowSave,
    orbax,
)
from jaxtrain.checkpoint import saving as saving_module
from jaxtrain.io.retry import RetryError, retry

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def state(value: float):
    return {"w": jnp.full((64, 64), float(value))}


def restored(folder: Path, step: int) -> float:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found, _ = CheckpointReader(folder).restore(
        step, {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)}
    )
    assert float(found["w"].min()) == float(found["w"].max())
    return float(found["w"].min())


def failing(real, times: int, error: Exception = FULL):
    """`real`, which fails the first `times` times."""
    left = [times]

    def operation(*args, **kwargs):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return real(*args, **kwargs)

    return operation


@pytest.mark.parametrize("place", ["data", "marker", "listing"])
def test_a_failing_save_is_retried_while_training_continues(tmp_path, monkeypatch, place):
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpointer(tmp_path, waits=(0.5, 0.2, 0.2)) as checkpoints:
        checkpoints.save(1, state(1), manifest={})
        checkpoints.wait()
        if place == "data":
            monkeypatch.setattr(orbax.ocp, "save", failing(orbax.ocp.save, 2))
        elif place == "marker":
            monkeypatch.setattr(saving_module, "write_marker", failing(saving_module.write_marker, 2))
        else:  # the folder itself does not answer, to the caller's thread nor at first to the save's
            monkeypatch.setattr(
                CheckpointStore, "steps", failing(CheckpointStore.steps, 3, PermissionError(errno.EACCES, "denied"))
            )
        now = add(state(1))
        assert checkpoints.save(2, now, manifest={})
        for _ in range(5):
            now = add(now)  # the buffers that were saved are gone
        first, *early = checkpoints.poll()
        assert isinstance(first, Committed)
        assert all(isinstance(event, Retrying) for event in early), "training waited for a failing save"
        checkpoints.wait()
        *again, last = early + checkpoints.poll()
        assert [type(event) for event in again] == [Retrying, Retrying]
        assert [event.number for event in again] == ["2 of 4", "3 of 4"]
        assert all("\n" not in str(event) and "trying again in 0." in str(event) for event in again)
        assert isinstance(last, Committed)
        assert last.tries == last.fields()["tries"] == 3
    assert restored(tmp_path, 2) == 2
    assert restored(tmp_path, 1) == 1
    assert sorted(os.listdir(tmp_path)) == [".lock", ".trash", "1", "2"]


def test_a_save_is_given_up_after_the_last_try(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, keep=1, waits=(0.01, 0.01)) as checkpoints:
        checkpoints.save(1, state(1), manifest={})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(orbax.ocp, "save", failing(orbax.ocp.save, 100))
            checkpoints.save(2, state(2), manifest={})
            checkpoints.wait()
        failed = checkpoints.poll()[-1]
        assert isinstance(failed, SaveFailed)
        assert str(failed).startswith("checkpoint 2 was not written in 3 tries: the disk is full")
        assert str(failed).endswith("checkpoint 1 stays the newest")
        assert restored(tmp_path, 1) == 1, "the last good one stays, whatever `keep` says"
        checkpoints.save(3, state(3), manifest={})
    assert [info.step for info in CheckpointStore(tmp_path).steps()] == [3]


@pytest.mark.measures
def test_a_newer_save_replaces_one_that_waits_for_its_retry(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, waits=(60.0,)) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(orbax.ocp, "save", failing(orbax.ocp.save, 1))
            checkpoints.save(1, state(1), manifest={})
            until(lambda: any(isinstance(event, Retrying) for event in checkpoints.poll()))
            begun = time.perf_counter()
            checkpoints.save(2, state(2), manifest={})
            assert time.perf_counter() - begun < 10
        checkpoints.wait()
        failed, committed = checkpoints.poll()
        assert isinstance(failed, SaveFailed)
        assert isinstance(committed, Committed)
        assert (failed.step, committed.step) == (1, 2)
    assert restored(tmp_path, 2) == 2


def until(ready) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_slow_save_is_waited_for_and_reported_once(tmp_path, monkeypatch):
    write = orbax.write
    monkeypatch.setattr(orbax, "write", lambda *args: (time.sleep(0.7), write(*args)))
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.save(step, state(step), manifest={})
        checkpoints.wait()
        events = checkpoints.poll()
        (slow,) = [event for event in events if isinstance(event, SlowSave)]
        assert (slow.step, slow.before, slow.skipped) == (2, 1, False)
        assert "raise checkpoint.every" in str(slow)
        committed = [event for event in events if isinstance(event, Committed)]
        assert [event.step for event in committed] == [1, 2, 3]
        assert "waited" not in committed[0].fields()
        assert all(event.fields()["waited"] > 0.5 for event in committed[1:])


@pytest.mark.measures
def test_a_save_that_hangs_costs_later_saves_and_not_the_run(tmp_path, monkeypatch):
    write, hangs = orbax.write, threading.Event()
    monkeypatch.setattr(orbax, "write", lambda *args: (hangs.wait(60), write(*args)))
    with Checkpointer(tmp_path, timeout=1.0) as checkpoints:
        assert checkpoints.save(1, state(1), manifest={})
        begun = time.perf_counter()
        assert checkpoints.save(2, state(2), manifest={}) is False
        assert time.perf_counter() - begun < 5
        (slow,) = checkpoints.poll()
        assert str(slow).startswith("checkpoint 2 skipped: checkpoint 1 is not written after another 1.0 s")
        hangs.set()
        checkpoints.wait()
        assert checkpoints.save(3, state(3), manifest={})
    assert [info.step for info in CheckpointStore(tmp_path).steps()] == [1, 3]


@pytest.mark.measures
def test_pauses_are_bounded_and_can_be_cut_short():
    stop, seen = threading.Event(), []

    def attempt():
        raise FULL

    with pytest.raises(RetryError) as error:
        retry(attempt, (0.01, 0.02), stop, lambda error: "full", lambda *args: seen.append(args))
    assert (error.value.reason, error.value.tries) == ("full", 3)
    assert seen == [("full", 0.01, "2 of 3"), ("full", 0.02, "3 of 3")]
    threading.Timer(0.2, stop.set).start()
    begun = time.perf_counter()
    with pytest.raises(RetryError):
        retry(attempt, (60.0,), stop, lambda error: "full", lambda *args: None)
    assert time.perf_counter() - begun < 30


TMPFS = """
import os, sys, time
import jax, jax.numpy as jnp
from jaxtrain.checkpoint import Checkpointer, Committed, SaveFailed, Retrying
folder, filler = sys.argv[1] + "/checkpoints", sys.argv[1] + "/filler"
state = {"w": jnp.arange(1 << 18, dtype=jnp.float32)}
with Checkpointer(folder, keep=2, waits=(0.3,) * 20) as checkpoints:
    checkpoints.save(1, state, manifest={})
    checkpoints.wait()
    (first,) = checkpoints.poll()
    assert isinstance(first, Committed), first
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    checkpoints.save(2, state, manifest={})
    steps = 0
    while not (events := checkpoints.poll()):
        steps, _ = steps + 1, time.sleep(0.01)  # training goes on
    assert isinstance(events[0], Retrying) and "the disk is full" in events[0].reason, events
    assert checkpoints.latest() == 1
    os.unlink(filler)
    checkpoints.wait()
    last = checkpoints.poll()[-1]
    assert isinstance(last, Committed) and last.step == 2 and last.tries > 1, last
print(sorted(os.listdir(folder)), flush=True)
"""


def test_a_full_disk_that_is_freed_costs_no_save(tmp_path):
    """On a real file system of 6 MiB, in a name space of its own."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=6m tmpfs "$0"'
    if not shutil.which("unshare") or subprocess.run([*unshare, mount, str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this user cannot mount a tmpfs")
    script = tmp_path.parent / "tmpfs.py"
    script.write_text(TMPFS)
    command = [*unshare, f'{mount} && exec "$1" "$2" "$0"', str(tmp_path), sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "['.lock', '.trash', '1', '2']\n"


def test_the_values_saved_are_those_of_the_step_even_on_a_later_try(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax.ocp, "save", failing(orbax.ocp.save, 1))
    step = jax.jit(lambda s: {"w": s["w"] @ jnp.eye(64) + 1}, donate_argnums=0)
    now = step(state(4))
    with Checkpointer(tmp_path, waits=(0.2,)) as checkpoints:
        checkpoints.save(5, now, manifest={})
        for _ in range(20):
            now = step(now)
        np.testing.assert_array_equal(now["w"], 25)
    assert restored(tmp_path, 5) == 5
