"""Saving and restoring the train state. `Reader` reads any run's folder, `Checkpointer` is its one writer."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jaxtrain.checkpoint import orbax
from jaxtrain.checkpoint.events import Committed, Event, Failed, SetAside
from jaxtrain.checkpoint.files import (
    FORMAT,
    PART,
    CheckpointError,
    Lock,
    fsync_folders,
    seal,
    step_files,
    write_durably,
    write_marker,
)
from jaxtrain.checkpoint.processes import agreed, first_text
from jaxtrain.checkpoint.snapshot import rematerialise, snapshot
from jaxtrain.checkpoint.store import StepInfo, Store
from jaxtrain.checkpoint.tree import Tensors, mismatch, named, named_arrays, nest, tensors, unnest

_POLL = 0.02  # seconds between looks for another process's file


class Reader:
    """Finds, checks and restores the checkpoints of a folder; renames and deletes nothing.

    With several processes each method is called by all of them, on the main thread.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.store = Store(directory)
        self._events: deque[Event] = deque()
        self._passed: set[int] = set()

    @property
    def directory(self) -> Path:
        """The folder."""
        return self.store.directory

    def latest(self) -> int | None:
        """Newest committed step, or None."""
        return self.store.latest()

    def steps(self) -> list[StepInfo]:
        """Committed steps with metrics and sizes, ascending."""
        return self.store.steps()

    def poll(self) -> list[Event]:
        """What happened since the last call, oldest first. Never blocks."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def restore(
        self, step: int | None, abstract_state: Any, *, partial: bool = False, verify: bool = True
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint straight into the target shardings, on any mesh and number of processes.

        Args:
          step: which; None for the newest good one. Then a damaged step is passed over with a `SetAside` event
            (and renamed `bad-N` by a `Checkpointer`) and the one before it is tried.
          abstract_state: pytree of jax.ShapeDtypeStruct, each with its sharding. The result has its structure.
          partial: the checkpoint may hold more, e.g. `{"params": ...}` is enough to evaluate.
          verify: check size and xxh3 digest of every file first (each process reads its share).

        Returns: (state, manifest). The arrays own their buffers, so that a donating step reuses all of them.

        Raises:
          CheckpointError: none found; damaged (with an explicit `step`); or a tensor is missing, superfluous or has
            another shape or dtype, naming them.
        """
        wanted = named(abstract_state)
        for name, leaf in wanted.items():
            if getattr(leaf, "sharding", None) is None:
                raise CheckpointError(f"cannot restore {name}: its ShapeDtypeStruct has no sharding")
        chosen = self._choose(step, verify)
        marker = self.store.marker(chosen)
        difference = mismatch(marker["tensors"], tensors(abstract_state), partial)
        if difference:
            raise CheckpointError(f"checkpoint {chosen} in {self.directory} does not fit this model: {difference}")
        try:
            flat = named(orbax.read(self.store.path(chosen), nest(wanted), wanted, partial))
        except Exception as error:
            message = f"checkpoint {chosen} in {self.directory} cannot be read: {orbax.reason_of(error)}"
            raise CheckpointError(message) from error
        rematerialise(flat)
        return unnest(nest(flat), abstract_state), marker["manifest"]

    def _choose(self, step: int | None, verify: bool) -> int:
        """The step to read: verified, the same on every process."""
        while True:
            candidates = [known for known in self.store.marked() if known not in self._passed]
            chosen = agreed(step if step is not None else (candidates[-1] if candidates else -1))
            if chosen < 0:
                passed = ", ".join(map(str, sorted(self._passed, reverse=True)))
                tried = f" (passed over as damaged: {passed})" if passed else ""
                raise CheckpointError(f"no usable checkpoint in {self.directory}{tried}")
            if step is not None:
                missing = None if self.store.path(chosen).is_dir() else f"no checkpoint {chosen} in {self.directory}"
                if missing := first_text(missing):
                    raise CheckpointError(f"{missing}: there is {[info.step for info in self.steps()] or 'none'}")
            share = (jax.process_index(), jax.process_count()) if verify else (0, 1 << 30)
            problem = first_text(self.store.problem(chosen, share))
            if problem is None:
                return chosen
            if step is not None:
                raise CheckpointError(f"checkpoint {chosen} in {self.directory} is damaged: {problem}")
            self._reject(chosen, problem)

    def _reject(self, step: int, problem: str) -> None:
        """A `Reader` only remembers that a step is damaged."""
        self._passed.add(step)
        self._events.append(SetAside(step, problem, None))


@dataclass
class _Save:
    """A save in flight."""

    step: int
    content: dict[str, Any]  # the marker, so far
    finish: Callable[[], None]  # returns when this process's part is on disk under its final name
    begun: float
    stall: float = 0.0
    waited: float = 0.0


class Checkpointer(Reader):
    """The one writer of a folder of checkpoints: asynchronous, sharded, atomic, with its own garbage collection.

    Args:
      directory: created when absent. A lock refuses a second writer.
      keep: newest checkpoints kept (at least 1).
      keep_best: checkpoints kept besides, lowest in `best` first.
      best: name of a metric given to `save`.
      timeout: seconds the processes wait for one another at a commit.

    Raises CheckpointError when another process writes there. What a crash left (temporaries, half-deleted steps, steps
    without marker) is deleted here.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: int = 0,
        best: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__(directory)
        self._keep, self._keep_best, self._best, self._timeout = keep, keep_best, best, timeout
        self._first = jax.process_index() == 0
        self._thread: threading.Thread | None = None
        self._lock: Lock | None = None
        refused = None
        if self._first:
            try:
                self._open()
            except (CheckpointError, OSError) as error:
                refused = str(error)
        if refused := first_text(refused):
            raise CheckpointError(refused)
        self._is_open = True

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.directory / ".lock")
        self.store.clean()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """Waits for the save in flight and frees the lock."""
        self.wait()
        self._is_open = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def wait(self) -> None:
        """Blocks until no save is in flight. How it went is in `poll`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def save(
        self,
        step: int,
        state: Any,
        *,
        manifest: dict[str, Any],
        metrics: dict[str, float] | None = None,
        copied: bool = True,
    ) -> bool:
        """Starts saving; the state may be donated to the next step as soon as this returns.

        One process: the copy to the host is dispatched, not waited for. Several: orbax copies this process's shards
        before it returns. Either way a save still in flight is waited for first. Disk errors come through `poll`, as
        `Failed`, and never touch earlier steps.

        Args:
          step: optimizer step of the state.
          state: pytree of jax.Arrays, any shardings; each process writes the shards it holds (of replica 0).
          manifest: what a resumed run needs to know (`promise.environment`); JSON-able.
          copied: False: one process, whose state nobody donates before `wait` returns, is written as it lies.
          metrics: finite numbers that rank `keep_best`; JSON-able.

        Returns: False when this step is already committed, True otherwise.

        Raises:
          CheckpointError: closed, not JSON-able, not jax.Arrays, or behind the newest checkpoint (see `rewind`).
        """
        begun = time.perf_counter()
        if not self._is_open:
            raise CheckpointError(f"checkpoint {step} cannot be saved: {self.directory} is closed")
        flat = named_arrays(state)
        content = _content(step, tensors(state), manifest, metrics)
        self.wait()
        waited = time.perf_counter() - begun
        if not self._admits(step):
            return False
        path = self.store.path(step)
        try:
            finish = self._start(path, flat, copied)
        except Exception as error:  # whatever orbax or the file system raises is reported, and training goes on
            self._fail(step, error)
            return True
        save = _Save(step, content, finish, begun, waited=waited)
        self._thread = threading.Thread(target=self._run, args=(save,), name=f"checkpoint-{step}")
        save.stall = time.perf_counter() - begun
        self._thread.start()
        return True

    def rewind(self, step: int) -> list[int]:
        """Renames the committed steps after `step` to `old-N`, so that training goes on from it. Returns them."""
        self.wait()
        newer = [known for known in self.store.marked() if known > step] if self._first else []
        for known in newer:
            path = self.store.set_aside(known, "old")
            self._events.append(SetAside(known, f"training goes on from step {step}", str(path)))
        agreed(0)
        return newer

    def restore(
        self, step: int | None, abstract_state: Any, *, partial: bool = False, verify: bool = True
    ) -> tuple[Any, dict[str, Any]]:
        """As `Reader.restore`, after the save in flight; a damaged newest step is renamed `bad-N`."""
        self.wait()
        return super().restore(step, abstract_state, partial=partial, verify=verify)

    def _reject(self, step: int, problem: str) -> None:
        path = None
        if self._first:
            path = str(self.store.set_aside(step, "bad"))
        agreed(0)  # nobody looks before it is renamed
        self._passed.add(step)
        self._events.append(SetAside(step, problem, path))

    def _admits(self, step: int) -> bool:
        """Whether a save of this step is due; the same on every process."""
        newest = -1
        if self._first:
            newest = self.store.latest()
            newest = -1 if newest is None else newest
            if newest < step:
                self._clear(step)
        newest = agreed(newest)
        if newest > step:
            raise CheckpointError(
                f"checkpoint {step} is behind the newest one ({newest}): call rewind({step}) to go on from there"
            )
        self._passed.discard(step)
        return newest != step

    def _clear(self, step: int) -> None:
        """Makes way for a save: leavings of a failed one are deleted, a step with a damaged marker is set aside."""
        self.store.clean(step)
        if self.store.path(step).exists():
            reason = self.store.problem(step) or "it is saved anew"
            self._events.append(SetAside(step, reason, str(self.store.set_aside(step, "bad"))))

    def _start(self, path: Path, flat: dict[str, jax.Array], copied: bool) -> Callable[[], None]:
        if jax.process_count() > 1:
            return orbax.start(path, nest(flat), self._timeout).result
        copies = nest(snapshot(flat) if copied else flat)
        return lambda: orbax.write(path, copies, self._timeout)

    def _run(self, save: _Save) -> None:
        """The background thread of one save: data, checksums, marker, then garbage collection."""
        try:
            save.finish()
            save.finish = _nothing  # frees the host copy
            self._seal(save)
            size = self._commit(save) if self._first else self._await_commit(save.step)
        except Exception as error:  # whatever fails in the background is reported by poll()
            self._fail(save.step, error)
            return
        try:
            deleted = self.store.prune(self._keep, self._keep_best, self._best) if self._first else []
        except OSError as error:
            self._events.append(Failed(save.step, f"saved, but older ones cannot be deleted: {error}", save.step))
            deleted = []
        seconds = time.perf_counter() - save.begun
        self._events.append(Committed(save.step, size, seconds, save.stall, save.waited, tuple(deleted)))

    def _seal(self, save: _Save) -> None:
        """Checksums of the files this process wrote, for process 0."""
        folder, index, count = self.store.path(save.step), jax.process_index(), jax.process_count()
        names = [name for name in step_files(folder) if _writer(name, count) == index]
        sealed = seal(folder, names)
        if self._first:
            save.content["files"].update(sealed)
        else:
            write_durably(folder / PART.format(index), json.dumps(sealed))

    def _commit(self, save: _Save) -> int:
        """Gathers the checksums, fsyncs the folders, writes the marker. Returns the bytes of the step."""
        folder = self.store.path(save.step)
        for index in range(1, jax.process_count()):
            part = folder / PART.format(index)
            _await(part.exists, self._timeout, f"process {index} sent no checksums within {self._timeout:.0f} s")
            save.content["files"].update(json.loads(part.read_text()))
        save.content["bytes"] = sum(size for size, _ in save.content["files"].values())
        fsync_folders(folder)
        write_marker(folder, save.content)
        for index in range(1, jax.process_count()):
            (folder / PART.format(index)).unlink()
        return save.content["bytes"]

    def _await_commit(self, step: int) -> int:
        def settled() -> bool:  # committed, or deleted by process 0 because it failed there
            return step in self.store.marked() or not self.store.path(step).exists()

        _await(settled, self._timeout, f"process 0 did not commit it within {self._timeout:.0f} s")
        return self.store.marker(step)["bytes"]

    def _fail(self, step: int, error: Exception) -> None:
        """Reports a failed save and deletes what it left, which also frees the space it took."""
        reason = orbax.reason_of(error)
        if self._first:
            try:
                self.store.clean(step)
            except OSError as second:
                reason += f" (and its leavings stay: {second})"
        self._events.append(Failed(step, reason, self.store.latest()))


def _content(step: int, saved: Tensors, manifest: dict[str, Any], metrics: dict[str, float] | None) -> dict[str, Any]:
    """The marker before its files are known. Raises CheckpointError when manifest or metrics are not JSON-able."""
    content = {
        "format": FORMAT, "step": step, "time": time.time(), "bytes": 0, "files": {},
        "tensors": saved, "manifest": manifest, "metrics": metrics or {},
    }  # fmt: skip
    try:
        return json.loads(json.dumps(content))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {step}: manifest and metrics must be JSON-able ({error})") from None


def _writer(name: str, processes: int) -> int:
    """The process that wrote a file: `.../ocdbt.process_3/...` is process 3's, what is common process 0's."""
    for part in name.split("/"):
        _, found, index = part.partition("process_")
        if found and index.isdecimal() and int(index) < processes:
            return int(index)
    return 0


def _await(ready: Callable[[], bool], timeout: float, message: str) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            raise CheckpointError(message)
        time.sleep(_POLL)


def _nothing() -> None:
    """Nothing is left to finish."""
