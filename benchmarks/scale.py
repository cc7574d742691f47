"""Measures how saves, checkpoints and plans grow: with processes, tensors and devices.

    python benchmarks/scale.py [--parts saves tensors devices] [--out scale.json]

`saves`: the coordination of a save by N processes of one kilobyte each: threads of this process, which talk to a real
coordination service of JAX by a client each, and write to one folder. `save` is the time from the first part to the
last process that knows the outcome, `first` the time that process 0 spends, `file calls` those of one other process on
the folder that all share (each of which a network file system answers).
`tensors`: a checkpoint of N small tensors on eight devices: stall, time to write, to restore, to list.
`devices`: seconds to check a layout and to plan its memory, traffic and speed, of 8B parameters on N H100, compiled in
pods (extra `plan-gpu`).

Each part ends with the exponent of its growth over the last two sizes: 1 is linear.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import common
import jax
import numpy as np
from jax._src.lib import _jax  # jax 0.10 has no public service without jax.distributed.initialize
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.multi_process_saving import MultiProcessSaver
from jaxtrain.checkpoint.saving import PendingSave, marker_content
from jaxtrain.checkpoint.store import CheckpointStore
from jaxtrain.core.layout_check import check_layout
from jaxtrain.core.resolve import resolve
from jaxtrain.distributed.kv_store import KeyValueStore
from jaxtrain.io.addresses import HeldPort
from jaxtrain.planning import predict

ROOT = Path(__file__).resolve().parent.parent
THREAD = threading.local()  # has the index of the process that a thread plays
TIMEOUT = 300


class Process:
    """One of the processes that save."""

    def __init__(self, index: int, count: int, address: str, store: CheckpointStore) -> None:
        THREAD.index = self.index = index
        self._client = _jax.get_distributed_runtime_client(address, index, init_timeout=60, heartbeat_timeout=600)
        self._client.connect()
        messages = KeyValueStore("save", self._client)
        self._saver = MultiProcessSaver(store, TIMEOUT, messages, (), self.events, list, lambda *_: None)
        self._saver._others = range(1, count)
        self._store, self.reports = store, []
        self.seconds = 0.0

    def events(self, event: object) -> None:
        self.reports.append(event)

    def save(self, step: int) -> None:
        """Writes and commits its part."""
        THREAD.index, folder = self.index, self._store.writing_path(step)
        name = f"state/ocdbt.process_{self.index}/d"

        def write() -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(bytes(1024))

        self._saver.begin(step)
        begun = time.perf_counter()
        self._saver._run(PendingSave(step, marker_content(step, {}, {}, {}), lambda: None, write, begun, folder=folder))
        self.seconds = time.perf_counter() - begun
        if not self._saver.is_saved:
            raise SystemExit(f"process {self.index} did not save: {self.reports}")

    def close(self) -> None:
        self._client.shutdown()


def in_threads(calls: list[Callable[[], object]]) -> float:
    """Runs all calls at once. Returns the seconds of the slowest one."""
    begun = time.perf_counter()
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def file_calls(folder: Path, processes: list[Process]) -> int:
    """Counts the folders that one process lists for its part."""
    listed, scandir = [], os.scandir

    def counting(path: Any) -> Any:
        listed.append(path)
        return scandir(path)

    THREAD.index, saver = 1, processes[1]._saver
    os.scandir = counting
    try:
        save = PendingSave(1, {}, lambda: None, lambda: None, 0.0, folder=folder)
        saver._seal(save)
    finally:
        os.scandir = scandir
    return len(listed)


def saves(count: int) -> dict[str, Any]:
    """Row of one number of processes."""
    port = HeldPort()
    address = f"127.0.0.1:{port.number}"
    port.close()
    service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=600)
    real_index, real_count = jax.process_index, jax.process_count
    jax.process_index, jax.process_count = lambda: THREAD.index, lambda: count
    processes: list[Process] = []
    try:
        with tempfile.TemporaryDirectory() as name:
            store = CheckpointStore(name)

            def join(index: int) -> None:
                processes.append(Process(index, count, address, store))

            in_threads([lambda index=index: join(index) for index in range(count)])
            processes.sort(key=lambda process: process.index)
            cpu = time.process_time()
            seconds = [in_threads([lambda p=p, s=step: p.save(s) for p in processes]) for step in (1, 2, 3)]
            cpu = time.process_time() - cpu
            listed = file_calls(store.path(3), processes)
            return {
                "processes": count, "save s": sorted(seconds)[1], "first s": processes[0].seconds,
                "cpu ms/process": 1000 * cpu / 3 / count, "folders listed": listed,
            }  # fmt: skip
    finally:
        in_threads([process.close for process in processes])
        service.shutdown()
        jax.process_index, jax.process_count = real_index, real_count


def tensors(count: int) -> dict[str, Any]:
    """Row of one number of tensors, of 16 x 16 float32 each."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "model"))
    values = jax.device_put([np.full((16, 16), i, np.float32) for i in range(count)], sharding)
    state = {f"layer_{i // 10}": {} for i in range(count)}
    for i, value in enumerate(values):
        state[f"layer_{i // 10}"][f"w{i % 10}"] = value
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with tempfile.TemporaryDirectory() as name:
        with Checkpointer(name, keep=1) as checkpoints:
            begun = time.perf_counter()
            checkpoints.save(1, state, manifest={})
            stall = time.perf_counter() - begun
            checkpoints.wait()
            write = time.perf_counter() - begun
            begun = time.perf_counter()
            checkpoints.store.steps()
            listing = time.perf_counter() - begun
            begun = time.perf_counter()
            restored, _ = checkpoints.restore(1, like)
            restore = time.perf_counter() - begun
        last = f"layer_{(count - 1) // 10}", f"w{(count - 1) % 10}"
        if float(restored[last[0]][last[1]][0, 0]) != count - 1:
            raise SystemExit("another value was restored")
        files = sum(path.is_file() for path in Path(name).rglob("*"))
    return {"tensors": count, "stall s": stall, "write s": write, "restore s": restore, "list s": listing,
            "files": files}  # fmt: skip


def devices(count: int) -> dict[str, Any]:
    """Row of one number of H100, in nodes of eight: replicas of 64 shards."""
    config, _ = resolve(
        str(ROOT / "configs/models/llama3_8b.yaml"), "step.remat=full", "precision=bf16", "data.sequence=4096",
        f"data.global_batch={2 * count}", "layout=hsdp", f"mesh.data={count // 64}", "mesh.fsdp=64", paths=False,
    )  # fmt: skip
    begun = time.perf_counter()
    check_layout(config)
    checked = time.perf_counter() - begun
    begun = time.perf_counter()
    plan = predict.predict(config, config.model.vocab, f"h100:{count // 8}x8")
    planned = time.perf_counter() - begun
    if plan.step_seconds is None:
        raise SystemExit(f"there is no plan for {count} devices: {plan.reason}")
    return {"devices": count, "check s": checked, "plan s": planned, "pods": " and ".join(plan.pods) or "whole",
            "needs GB": plan.needs / 1e9, "step s": plan.step_seconds}  # fmt: skip


PARTS = {
    "saves": (saves, (16, 64, 256, 1024), (2, 4)),
    "tensors": (tensors, (100, 1000, 10_000), (10, 20)),
    "devices": (devices, (512, 4096, 65_536), ()),
}


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Exponents of growth over the last two sizes."""
    if len(rows) < 2:
        return {}
    (size, *_), before, last = rows[0], rows[-2], rows[-1]
    by = math.log(last[size] / before[size])
    names = [name for name in last if name.endswith(" s") and name != "step s"]
    return {name: math.log(last[name] / before[name]) / by for name in names}


def main() -> None:
    """Prints the tables."""
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    about, results = common.machine("orbax-checkpoint"), {}
    print(common.title(about))
    for part in args.parts:
        measure, sizes, smallest = PARTS[part]
        rows = [measure(size) for size in (smallest if args.quick else sizes)]
        results[part] = {"rows": rows, "exponents": (grown := exponents(rows))}
        growth = ", ".join(f"{name.removesuffix(' s')} {value:.2f}" for name, value in grown.items())
        print("", common.table(rows), f"exponents: {growth}", sep="\n", flush=True)
    common.report("scale", args, results, about)


if __name__ == "__main__":
    main()
