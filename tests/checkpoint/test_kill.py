"""A process killed at any instant leaves the newest listed step whole; a full disk costs one save and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Checkpointer, Reader, Store, files

SAVER = """
import sys
import jax, jax.numpy as jnp
from jaxtrain.checkpoint import Checkpointer
with Checkpointer(sys.argv[1], keep=2) as checkpoints:
    first = (checkpoints.latest() or 0) + 1
    state = {f"w{i}": jnp.full((256, 256), float(first)) for i in range(4)}
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    print("ready", flush=True)
    for step in range(first, first + 10_000):
        checkpoints.save(step, state, manifest={"step": step})
        state = add(state)
"""


def start(code: str, *args: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate(timeout=30)
    return process


def kill_after(process: subprocess.Popen, seconds: float) -> None:
    time.sleep(seconds)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_kill_during_save_leaves_the_newest_step_whole(tmp_path):
    rng = random.Random(0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding) for i in range(4)}
    newest = 0
    for _ in range(3):
        kill_after(start(SAVER, tmp_path), rng.uniform(0.6, 1.2))
        reader = Reader(tmp_path)
        latest = reader.latest()
        assert latest is not None
        assert latest > newest, "each round commits steps of its own"
        for info in reader.steps():
            state, manifest = reader.restore(info.step, like)
            assert manifest == {"step": info.step}
            for leaf in jax.tree.leaves(state):
                np.testing.assert_array_equal(leaf, np.full((256, 256), info.step, np.float32))
        newest = latest
    with Checkpointer(tmp_path):
        names = sorted(name for name in os.listdir(tmp_path) if not name.startswith("."))
    assert all(name.isdecimal() for name in names), names
    assert len(names) <= 3, "at most one step more than kept, when killed before the collection"


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it."""


def commit(store: Store, step: int) -> None:
    """Writes and commits a step of a few files, then collects garbage, as the background thread of a save does."""
    folder = store.path(step)
    (folder / "state" / "d").mkdir(parents=True)
    names = [f"state/d/{i}" for i in range(5)]
    for name in names:
        (folder / name).write_bytes(bytes([step]) * 500)
    files.fsync_folders(folder)
    content = {"format": files.FORMAT, "step": step, "time": 0, "bytes": 1, "files": files.seal(folder, names)}
    files.write_marker(folder, content | {"manifest": {}, "metrics": {}, "tensors": {}})
    store.prune(2)


def test_killed_before_any_file_operation_only_whole_steps_are_listed(tmp_path, monkeypatch):
    """Every instant between two file operations of a commit and its garbage collection, one after the other."""
    operations = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")
    seen = set()
    for kill_at in range(1, 200):
        store = Store(tmp_path / str(kill_at))
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
from jaxtrain.checkpoint import Checkpointer, Committed, Failed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
with Checkpointer(sys.argv[1]) as checkpoints:
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
    assert isinstance(second, Failed) and second.newest == 1, second
    print(second, flush=True)
"""


def test_a_file_size_limit_costs_one_save_only(tmp_path):
    out, err = start(FULL, tmp_path).communicate(timeout=60)
    assert out.startswith("checkpoint 2 was not written: the disk is full or a size limit is reached"), err
    assert out.endswith("checkpoint 1 stays the newest\n")
    assert [info.step for info in Store(tmp_path).steps()] == [1, 3]
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
