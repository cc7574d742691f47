"""Causes failures on purpose, each once in a run's folder, to test recovery (`debug.faults`).

A fault is written to RUN_DIR/faults.jsonl before it happens, so that the restarted run does not meet it again; a fault
that is given twice happens twice.

    kill, stop, hang   SIGKILL, SIGSTOP, or a wait for ever, at a moment:
                         step        after that many steps, the last one still running
                         data        in the loader, while it makes the batch of that step
                         eval        in the validation after that step
                         logged      metrics are written, the checkpoint is not begun
                         save        some of the checkpoint's files are written
                         commit      all is written but the rename of its marker
                         committed   the marker is written, nothing is logged yet
    slow_disk          writing that checkpoint takes SLOW seconds more
    full_disk          writing it raises ENOSPC (one of several processes: after its part is written)
    corrupt            bytes of a file are flipped after its commit
    nan                all gradients of that step are NaN, in the graph (`core.step`)
    flip               one bit of one replica of a replicated parameter is flipped after that step
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxtrain.callbacks.base import Callback, Fetch, TrainerView
from jaxtrain.checkpoint import orbax
from jaxtrain.checkpoint.files import MARKER
from jaxtrain.config.checks import FAULT_MOMENTS
from jaxtrain.config.schema import Config, DebugConfig, FaultConfig
from jaxtrain.core.program import State
from jaxtrain.errors import UserError
from jaxtrain.io.jsonl import append_record, read_records

FILE = "faults.jsonl"
SLOW = 2.0
FLIPPED = 64  # bytes


def moment(fault: FaultConfig) -> str:
    """Returns when within its step a fault happens."""
    return fault.at or FAULT_MOMENTS[fault.kind][0]


def describe(fault: FaultConfig) -> str:
    """Returns the name of a fault in faults.jsonl, such as `kill@save:8/0`."""
    return f"{fault.kind}@{moment(fault)}:{fault.step}/{fault.process}"


def remaining_faults(faults: Sequence[FaultConfig], run_dir: Path) -> tuple[FaultConfig, ...]:
    """Returns the faults that have not happened in this folder."""
    counts = Counter(past_faults(run_dir))
    remaining = []
    for fault in faults:
        name = describe(fault)
        if counts[name] > 0:
            counts[name] -= 1
        else:
            remaining.append(fault)
    return tuple(remaining)


def past_faults(run_dir: Path) -> list[str]:
    """Returns the names of the faults that happened in this folder; a line that a kill broke never happened."""
    return [str(record["fault"]) for _, record in read_records(run_dir / FILE) if record and "fault" in record]


class FaultInjection(Callback):
    """Triggers the faults of the config, each once per run directory.

    During training the functions that write checkpoints are wrapped, if a fault needs it.
    """

    def __init__(self) -> None:
        self._pending: list[FaultConfig] = []
        self._run_dir, self._patches, self._lock = Path(), ExitStack(), threading.Lock()

    def program_config(self, config: Config, run_dir: Path) -> Config:
        """Returns the config with the faults that have not happened yet."""
        remaining, index = remaining_faults(config.debug.faults, run_dir), jax.process_index()
        self._run_dir = run_dir
        self._pending = [fault for fault in remaining if fault.process == index or fault.kind == "nan"]
        return config.model_copy(update={"debug": DebugConfig(faults=remaining)})

    def on_train_begin(self, trainer: TrainerView, step: int) -> None:
        """Wraps the functions that write checkpoints."""
        if any(moment(fault) in ("save", "commit", "committed") for fault in self._pending):
            for owner, name, wrapped in (
                (orbax, "write", self._wrap_write(orbax.write)),
                (orbax, "start", self._wrap_write(orbax.start, is_joint=True)),
                (os, "replace", self._wrap_rename(os.replace)),
            ):
                self._patches.enter_context(mock.patch.object(owner, name, wrapped))

    def close(self, trainer: TrainerView) -> None:
        """Unwraps the functions that write checkpoints."""
        self._patches.close()

    def wrap_fetch(self, fetch: Fetch) -> Fetch:
        """Adds the faults of the loader."""
        if not any(moment(fault) == "data" for fault in self._pending):
            return fetch

        def fetch_with_faults(index: int) -> Any:
            self.trigger("data", index + 1)
            return fetch(index)

        return fetch_with_faults

    def replace_state(self, trainer: TrainerView, state: State, step: int) -> State:
        """Triggers the faults after a step. Returns its state, with a flipped bit if that is due."""
        for fault in self._take("step", step):
            if fault.kind == "flip":
                state = {**state, "params": flip_bit(state["params"], step)}
            elif fault.kind in ENDS:
                ENDS[fault.kind]()
        return state

    def on_evaluate_begin(self, trainer: TrainerView, step: int) -> None:
        """Triggers the faults of the validation."""
        self.trigger("eval", step)

    def allows_save(self, trainer: TrainerView, state: State, step: int, is_last: bool) -> bool:
        """Triggers the faults between logging and saving."""
        self.trigger("logged", step)
        return True

    def trigger(self, when: str, step: int) -> None:
        """Triggers the faults of a moment of a step that end the process."""
        for fault in self._take(when, step):
            if fault.kind in ENDS:
                ENDS[fault.kind]()

    def _take(self, when: str, step: int) -> list[FaultConfig]:
        """Removes the faults of a moment from the pending ones, records them on disk, and returns them."""
        with self._lock:
            matches = [fault for fault in self._pending if moment(fault) == when and fault.step == step]
            due = list({describe(fault): fault for fault in matches}.values())  # of equal faults one at a time
            for fault in due:
                self._pending.remove(fault)
                record_fault(self._run_dir, describe(fault))
        return due

    def _wrap_write(self, real: Callable, is_joint: bool = False) -> Callable:
        """Wraps a function that writes a checkpoint; with `is_joint` a full disk is an error of its `result()`."""

        def write(path: Path, *args: Any) -> Any:
            due, is_full = self._take("save", _step_of(path)), False
            for fault in due:
                if fault.kind == "slow_disk":
                    time.sleep(SLOW)
                elif fault.kind == "full_disk" and is_joint:
                    is_full = True
                elif fault.kind == "full_disk":
                    raise _disk_full_error()
                else:
                    threading.Thread(target=_when_begun, args=(path, ENDS[fault.kind]), daemon=True).start()
            result = real(path, *args)
            if any(fault.kind in ENDS for fault in due):
                time.sleep(SLOW)  # the disk may have been faster than the thread that kills
            return dataclasses.replace(result, result=partial(_fail_when_written, result)) if is_full else result

        return write

    def _wrap_rename(self, real: Callable) -> Callable:
        def replace(source: Any, target: Any, **options: Any) -> None:
            path = Path(target)
            step = _step_of(path.parent) if path.name == MARKER else -1
            self.trigger("commit", step)
            real(source, target, **options)
            for fault in self._take("committed", step):
                if fault.kind == "corrupt":
                    corrupt_checkpoint(path.parent, fault.step)
                else:
                    ENDS[fault.kind]()

        return replace


def _fail_when_written(part: orbax.PartialSave) -> None:
    """Waits until a part is written, and then finds the disk full."""
    part.result()
    raise _disk_full_error()


def _disk_full_error() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device (injected fault)")


def record_fault(run_dir: Path, text: str) -> None:
    """Records on disk that a fault happens."""
    append_record(run_dir / FILE, {"fault": text, "pid": os.getpid()}, sync=True)


def corrupt_checkpoint(folder: Path, seed: int) -> Path:
    """Flips bits in the largest file of a checkpoint, in place. Returns the file."""
    files = sorted((path for path in folder.rglob("*") if path.is_file() and path.name != MARKER), key=str)
    path = max(files, key=lambda file: file.stat().st_size)
    size, rng = path.stat().st_size, random.Random(seed)
    with open(path, "r+b") as file:
        for _ in range(min(FLIPPED, size)):
            position = rng.randrange(size)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return path


def flip_bit(params: Any, seed: int) -> Any:
    """Flips one bit of one replica of the first replicated parameter, on the last device that holds it.

    The other replicas stay unchanged, which JAX does not notice. Raises UserError if no parameter has replicas on
    devices of this process.
    """
    leaves, tree = jax.tree.flatten(params)
    for index, leaf in enumerate(leaves):
        copies = [str(shard.index) for shard in leaf.addressable_shards]
        if copies.count(copies[-1]) > 1:
            leaves[index] = _flip_last_shard(leaf, seed)
            return jax.tree.unflatten(tree, leaves)
    raise UserError("debug.faults: flip: no parameter has replicas here; expected a layout with replicas, such as ddp")


def _flip_last_shard(leaf: jax.Array, seed: int) -> jax.Array:
    """Flips the lowest bit of one byte of the last shard, too little to be visible in the loss."""
    shards = [shard.data for shard in leaf.addressable_shards]
    wrong = np.array(jax.device_get(shards[-1]))
    flat = wrong.reshape(-1).view(np.uint8)
    flat[(seed * wrong.itemsize) % flat.size] ^= 1
    shards[-1] = jax.device_put(wrong, leaf.addressable_shards[-1].device)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _hang() -> None:
    while True:
        time.sleep(3600)


ENDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
}


def _when_begun(path: Path, end: Callable[[], None]) -> None:
    """Calls `end` as soon as files of a save exist, at the latest when the save should be done."""
    deadline = time.monotonic() + SLOW / 2
    while time.monotonic() < deadline:
        folders = [one for one in path.parent.glob(f"{path.name}*") if one.is_dir()]
        if any(file.is_file() for folder in folders for file in folder.rglob("*")):
            break
        time.sleep(0.001)
    end()


def _step_of(folder: Path) -> int:
    """Returns the step of a checkpoint folder, `.../8` or `.../8.orbax...`; -1 for any other folder."""
    name = Path(folder).name.partition(".")[0]
    return int(name) if name.isdecimal() else -1
