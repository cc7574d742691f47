"""A process killed at any instant leaves the newest listed step whole; a full disk costs one save and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpointer, CheckpointReader, CheckpointStore, files
from jaxtrain.checkpoint.store import Retention

SAVER = """
import sys
import jax, jax.numpy as jnp
from jaxtrain.checkpoint import Checkpointer, Committed, Copied
with Checkpointer(sys.argv[1], keep=2, durable=sys.argv[1] + "-far", durable_every=2) as checkpoints:
    first = (checkpoints.latest() or 0) + 1
    state = {f"w{i}": jnp.full((256, 256), float(first)) for i in range(4)}
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    print("ready", flush=True)
    for step in range(first, first + 10_000):
        checkpoints.save(step, state, manifest={"step": step})
        state = add(state)
        for event in checkpoints.poll():
            if isinstance(event, (Committed, Copied)):
                print(type(event).__name__, event.step, flush=True)
"""


def start(code: str, *args: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate(timeout=30)
    return process


def kill_after(process: subprocess.Popen, seconds: float) -> str:
    """Returns what it had printed."""
    time.sleep(seconds)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    return process.communicate()[0]


LIKE = {f"w{i}": (256, 256) for i in range(4)}


def check_whole(folder: Path) -> list[int]:
    """Steps of a folder, after a look at every value of each."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for name, shape in LIKE.items()}
    reader = CheckpointReader(folder)
    steps = [info.step for info in reader.steps()]
    for step in steps:
        state, manifest = reader.restore(step, like)
        assert manifest == {"step": step}
        for leaf in jax.tree.leaves(state):
            np.testing.assert_array_equal(leaf, np.full((256, 256), step, np.float32))
    return steps


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)])])
def test_kill_leaves_the_newest_step_whole_in_both_tiers(tmp_path, rounds):
    """Killed while it saves, commits, collects garbage and copies, and `checkpoint prune` too: at seeded moments."""
    rng = random.Random(rounds)
    near, far, newest = tmp_path / "run", tmp_path / "run-far", {"Committed": 0, "Copied": 0}
    for _ in range(rounds):
        process = start(SAVER, near)
        first = process.stdout.readline()
        for line in (first + kill_after(process, rng.uniform(0, 0.6))).splitlines():
            newest[line.split()[0]] = int(line.split()[1])
        steps = check_whole(near)
        assert steps[-1] >= newest["Committed"] > 0, "what was reported is there"
        copies = check_whole(far) if far.is_dir() else []
        assert not newest["Copied"] or copies[-1] >= newest["Copied"]
        prune = subprocess.Popen([sys.executable, "-c", PRUNE, near, str(rng.uniform(0, 0.02))])
        assert prune.wait(60) in (0, -signal.SIGKILL)
        assert check_whole(near)[-1] == steps[-1]
    with Checkpointer(near, durable=str(far)) as checkpoints:
        checkpoints.finish()
    for folder in (near, far):
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        assert all(name.isdecimal() for name in names), names
        assert os.listdir(folder / ".trash") == []
        assert len(names) <= 4, "at most one step more than kept, when killed before the collection, and the copy"


PRUNE = """
import os, signal, sys, threading
from jaxtrain.cli.commands import checkpoints
from jaxtrain.cli.main import main
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
main(["checkpoint", "prune", sys.argv[1], "--keep", "1"])
os._exit(0)
"""


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it."""


def commit(store: CheckpointStore, step: int) -> None:
    """Writes and commits a step of a few files, then collects garbage, as the background thread of a save does."""
    folder = store.path(step)
    (folder / "state" / "d").mkdir(parents=True)
    names = [f"state/d/{i}" for i in range(5)]
    for name in names:
        (folder / name).write_bytes(bytes([step]) * 500)
    files.fsync_folders(folder)
    content = {
        "format": files.FORMAT,
        "step": step,
        "time": 0,
        "bytes": 1,
        "files": files.flush_and_digest(folder, names),
    }
    files.write_marker(folder, content | {"manifest": {}, "metrics": {}, "tensors": {}})
    store.prune(Retention(2))


def test_killed_before_any_file_operation_only_whole_steps_are_listed(tmp_path, monkeypatch):
    """Every instant between two file operations of a commit and its garbage collection, one after the other."""
    operations = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")
    seen = set()
    for kill_at in range(1, 200):
        store = CheckpointStore(tmp_path / str(kill_at))
        store.directory.mkdir()
        for step in (1, 2, 3):
            commit(store, step)
        left = kill_at

        def patched(real, name):
            def operation(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    seen.add(name)
                if left <= 0:
                    raise Killed
                return real(*args, **kwargs)

            return operation

        with monkeypatch.context() as patch:
            for name in operations:
                patch.setattr(os, name, patched(getattr(os, name), name))
            try:
                commit(store, 4)
                finished = True
            except Killed:
                finished = False
        steps = [info.step for info in store.steps()]
        assert steps in ([2, 3], [2, 3, 4], [3, 4]), kill_at
        assert [store.problem(step) for step in steps] == [None] * len(steps), kill_at
        store.clean()
        assert [info.step for info in store.steps()] == steps
        assert sorted(os.listdir(store.directory)) == sorted([".trash", *map(str, steps)])
        assert os.listdir(store.directory / ".trash") == []
        if finished:
            break
    assert finished
    assert seen == set(operations)


FULL = """
import resource, signal, sys
import jax, jax.numpy as jnp
from jaxtrain.checkpoint import Checkpointer, Committed, SaveFailed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
with Checkpointer(sys.argv[1], waits=()) as checkpoints:
    print("ready", flush=True)
    checkpoints.save(1, state, manifest={})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    checkpoints.save(2, state, manifest={})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoints.save(3, state, manifest={})
    checkpoints.wait()
    first, second, third = checkpoints.poll()
    assert isinstance(first, Committed) and isinstance(third, Committed), (first, third)
    assert isinstance(second, SaveFailed) and second.newest == 1, second
    print(second, flush=True)
"""


def test_a_file_size_limit_costs_one_save_only(tmp_path):
    out, err = start(FULL, tmp_path).communicate(timeout=60)
    assert out.startswith("checkpoint 2 was not written: the disk is full or a size limit is reached"), err
    assert out.endswith("checkpoint 1 stays the newest\n")
    assert [info.step for info in CheckpointStore(tmp_path).steps()] == [1, 3]
    assert sorted(os.listdir(tmp_path)) == [".lock", ".trash", "1", "3"]


def test_another_process_is_refused_until_the_writer_dies(tmp_path):
    writer = start(SAVER, tmp_path)
    code = "import sys; from jaxtrain.checkpoint import Checkpointer; Checkpointer(sys.argv[1])"
    second = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"is being written by process {writer.pid} on" in second.stderr
    kill_after(writer, 0.1)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.poll() == []
