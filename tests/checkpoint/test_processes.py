"""Two processes (gloo, four simulated devices each): each writes its own shards, both agree on what to read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as orbax

from jaxtrain.checkpoint import CheckpointReader, CheckpointStore, files
from jaxtrain.checkpoint.multi_process_saving import MultiProcessSaver
from jaxtrain.checkpoint.orbax import files_of_process, written_by_another
from jaxtrain.checkpoint.saving import PendingSave, no_op
from jaxtrain.errors import CheckpointError

WORKER = """
import json, os, resource, signal, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
port, index, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, 2, index, coordinator_bind_address=address, initialization_timeout=60)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtrain.checkpoint import Checkpointer, Committed, SetAside, SlowSave
from jaxtrain.distributed.multihost import broadcast
from jaxtrain.trainer.signals import Signals
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)
specs = {"w": NamedSharding(mesh, P("fsdp", "model")), "scale": NamedSharding(mesh, P())}

@jax.jit
def init(seed):
    return jax.lax.with_sharding_constraint(
        {"w": jnp.arange(1 << 18, dtype=jnp.float32).reshape(512, 512) + seed, "scale": jnp.float32(seed)}, specs)

like = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=specs["w"]),
        "scale": jax.ShapeDtypeStruct((), jnp.float32, sharding=specs["scale"])}
checkpoints = Checkpointer(folder, keep=3, timeout=60)
for step in (10, 20):
    checkpoints.save(step, init(step), manifest={"step": step})
checkpoints.wait()
events = [event for event in checkpoints.poll() if not isinstance(event, SlowSave)]  # the machine may be busy
assert [type(event) for event in events] == [Committed] * 2, events
assert checkpoints.save(20, init(20), manifest={}) is False
if index == 0:  # flip a bit of what process 1 wrote
    names = [p for p in (folder / "20").rglob("*") if p.is_file() and "process_1" in str(p)]
    data = max(names, key=lambda p: p.stat().st_size)
    raw = bytearray(data.read_bytes()); raw[len(raw) // 2] ^= 4; data.write_bytes(raw)
state, manifest = checkpoints.restore(None, like)
assert manifest == {"step": 10}, manifest
for ours, expected in zip(jax.tree.leaves(state), jax.tree.leaves(init(10))):
    for a, b in zip(ours.addressable_shards, expected.addressable_shards):
        np.testing.assert_array_equal(a.data, b.data)
(event,) = checkpoints.poll()
assert isinstance(event, SetAside) and event.step == 20 and "another checksum" in event.reason, event
checkpoints.save(30, init(30), manifest={"step": 30})
checkpoints.close()
# One process cannot write its part: nobody waits for it, nothing is lost, all save again.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
with Checkpointer(folder, keep=3, timeout=300, waits=(0.1,)) as checkpoints:
    if index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    begun = time.monotonic()
    checkpoints.save(40, init(40), manifest={"step": 40})
    checkpoints.wait()
    assert time.monotonic() - begun < 20
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    time.sleep(0.2)
    again = next(step for step in range(41, 99) if broadcast(1) and checkpoints.is_retry_due(step))
    assert again == 45, again
    checkpoints.save(45, init(45), manifest={"step": 45})
    checkpoints.save(50, init(50), manifest={"step": 50})
    checkpoints.wait()
    said = [str(event) for event in checkpoints.poll()]
assert said[0].startswith("checkpoint 40 could not be written: process 1: the disk is full"), said
assert [line.partition(":")[0] for line in said[1:]] == ["checkpoint 45", "checkpoint 50"], said
with Signals() as signals:  # one process is told to stop, both stop at the same step
    for step in range(200):
        if index == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if signals.stop_at(step):
            break
        time.sleep(0.05)
print(json.dumps({"stopped": step}), flush=True)
jax.distributed.shutdown()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_write_their_shards_and_agree(tmp_path: Path):
    port = free_port()
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-c", WORKER, str(port)]
    workers = [
        subprocess.Popen(
            [*command, str(index), str(tmp_path)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for index in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, err) in zip(workers, outputs):
        assert worker.returncode == 0, err[-3000:]
    stopped = {out.strip().splitlines()[-1] for out, _ in outputs}
    assert len(stopped) == 1
    assert stopped != {'{"stopped": 199}'}

    store = CheckpointStore(tmp_path)
    assert [info.step for info in store.steps()] == [30, 45, 50]
    assert not (tmp_path / "40").exists()
    assert (tmp_path / "bad-20").is_dir()
    sizes = {0: 0, 1: 0}
    for name, (size, _) in store.marker(30)["files"].items():
        for index in sizes:
            if f"ocdbt.process_{index}/d/" in name:
                sizes[index] += size
    half = 512 * 512 * 4 // 2
    assert all(half <= size < 1.2 * half for size in sizes.values()), sizes
    assert not list((tmp_path / "30").glob(files.PART.format("*")))

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    like = {
        "w": jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, P("a", "b"))),
        "scale": jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P())),
    }
    state, _ = CheckpointReader(tmp_path).restore(None, like)
    np.testing.assert_array_equal(state["w"], np.arange(1 << 18, dtype=np.float32).reshape(512, 512) + 50)
    assert float(state["scale"]) == 50
    assert float(orbax.load(str(tmp_path / "50"), like)["scale"]) == 50  # also without jaxtrain


def test_each_file_of_a_step_has_one_writer(tmp_path):
    ours = ["state/_METADATA", "state/manifest.ocdbt", "state/array_metadatas/process_0", "state/ocdbt.process_0/d/a"]
    others = {n: [f"state/array_metadatas/process_{n}", f"state/ocdbt.process_{n}/d/a"] for n in (1, 10)}
    for name in [*ours, *others[1], *others[10]]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [files_of_process(tmp_path, n) for n in (1, 10, 2)] == [others[1], others[10], []]
    assert [name for name in files.step_files(tmp_path) if not written_by_another(name)] == sorted(ours)


def test_a_file_that_no_process_lists_is_not_committed(tmp_path, monkeypatch):
    """A newer orbax may call its folders otherwise: a marker without their checksums would say too much."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    store = CheckpointStore(tmp_path)
    saver = MultiProcessSaver(store, 1.0, SimpleNamespace(child=lambda _: None), (), print, list, print)
    folder = store.writing_path(7)
    (folder / "state/part-of-1").mkdir(parents=True)
    (folder / "state/part-of-1/d").touch()
    (folder / files.PART.format(1)).write_text("{}")
    with pytest.raises(CheckpointError, match="checkpoint 7: state/part-of-1/d is in no process's list of its files"):
        saver._commit(PendingSave(7, {}, no_op, no_op, 0.0, folder=folder))
