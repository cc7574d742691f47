"""Saves in the background: data, checksums, marker; tried again where that fails, while training goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxtrain.checkpoint.events import Committed, Event, Failed, Retrying
from jaxtrain.checkpoint.files import (
    FORMAT,
    PART,
    CheckpointError,
    fsync_folders,
    is_inside,
    seal,
    step_files,
    write_durably,
    write_marker,
)
from jaxtrain.checkpoint.reasons import reason_of
from jaxtrain.checkpoint.retry import GivenUp, persist
from jaxtrain.checkpoint.store import Store
from jaxtrain.checkpoint.tree import Tensors

_POLL = 0.02  # seconds between looks for another process's file


@dataclass
class Save:
    """A save in flight.

    Attributes:
      content: the marker, so far.
      prepare: makes way for the step, before each try; raises what stands in it.
      write: returns when this process's part is on disk under its final name.
      repeats: whether these can be called again after they failed.
      begun: `time.perf_counter()` when it was asked for.
    """

    step: int
    content: dict[str, Any]
    prepare: Callable[[], None]
    write: Callable[[], None]
    repeats: bool
    begun: float
    stall: float = 0.0
    waited: float = 0.0
    files: dict[str, Any] = field(default_factory=dict)
    is_writing: bool = False


class Saver:
    """Runs one save at a time in a thread of its own. Whatever fails there is an event, never an exception.

    Args:
      timeout: seconds the processes wait for one another at a commit.
      waits: seconds between tries.
      report: takes events, from the thread.
      collect: called on process 0 after a commit; returns the older steps it has deleted.
      offer: called on process 0 with a committed step, after its event.
    """

    def __init__(
        self,
        store: Store,
        timeout: float,
        waits: Sequence[float],
        report: Callable[[Event], None],
        collect: Callable[[], list[int]],
        offer: Callable[[int], None],
    ) -> None:
        self._store, self._timeout, self._waits = store, timeout, tuple(waits)
        self._report, self._collect, self._offer = report, collect, offer
        self._first = jax.process_index() == 0
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self.step = -1  # of the save in flight, or of the last one
        self.is_saved = False  # whether the last one was committed
        self.reason: str | None = None  # why it was not
        self.newest: int | None = None  # step that stayed the newest then

    def start(self, save: Save) -> None:
        """Begins a save; there must be none in flight."""
        self.step, self.is_saved, self.reason = save.step, False, None
        self._hurry.clear()
        # A daemon, because one that hangs in a dead file system must not keep a finished program from its end.
        self._thread = threading.Thread(target=self._run, args=(save,), name=f"checkpoint-{save.step}", daemon=True)
        save.stall = time.perf_counter() - save.begun
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until no save is in flight, `timeout` seconds at most; whether there is none."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def hurry(self) -> None:
        """Something newer waits: the save in flight may finish its try, but begins no other."""
        self._hurry.set()

    def fail(self, step: int, error: Exception, has_begun: bool) -> None:
        """Reports a save that came to nothing; what it wrote, if it had begun to, is deleted."""
        self._give_up(step, self._tidied(step, error) if has_begun else reason_of(error), 1)

    def _run(self, save: Save) -> None:
        """The thread of one save."""
        tries = 1

        def again(reason: str, wait: float, number: str) -> None:
            nonlocal tries
            tries += 1
            self._report(Retrying(save.step, reason, wait, number))

        try:
            size = persist(
                lambda: self._attempt(save),
                self._waits if save.repeats else (),
                self._hurry,
                lambda error: self._tidied(save.step, error) if save.is_writing else reason_of(error),
                again,
            )
        except GivenUp as error:
            self._give_up(save.step, error.reason, error.tries)
            return
        finally:
            save.write = nothing  # frees the host copy
        try:
            deleted = self._collect() if self._first else []
        except OSError as error:
            self._report(Failed(save.step, f"saved, but older ones cannot be deleted: {error}", save.step))
            deleted = []
        self.is_saved = True
        seconds = time.perf_counter() - save.begun
        self._report(Committed(save.step, size, seconds, save.stall, save.waited, tuple(deleted), tries))
        if self._first:
            self._offer(save.step)

    def _attempt(self, save: Save) -> int:
        """Writes, seals and commits. Returns the bytes of the step, of all processes."""
        save.is_writing = False
        save.prepare()
        save.is_writing = True
        save.write()
        self._seal(save)
        return self._commit(save) if self._first else self._await_commit(save.step)

    def _seal(self, save: Save) -> None:
        """Checksums of the files this process wrote, for process 0."""
        folder, index, count = self._store.path(save.step), jax.process_index(), jax.process_count()
        names = [name for name in step_files(folder) if _writer(name, count) == index]
        sealed = seal(folder, names)
        if self._first:
            save.files = dict(sealed)
        else:
            write_durably(folder / PART.format(index), json.dumps(sealed))

    def _commit(self, save: Save) -> int:
        """Gathers the checksums, fsyncs the folders, writes the marker. Returns the bytes of the step."""
        folder = self._store.path(save.step)
        for index in range(1, jax.process_count()):
            part = folder / PART.format(index)
            _await(part.exists, self._timeout, f"process {index} sent no checksums within {self._timeout:.0f} s")
            save.files |= {name: found for name, found in json.loads(part.read_text()).items() if is_inside(name)}
        size = sum(size for size, _ in save.files.values())
        fsync_folders(folder)
        write_marker(folder, save.content | {"files": save.files, "bytes": size})
        for index in range(1, jax.process_count()):
            (folder / PART.format(index)).unlink()
        return size

    def _await_commit(self, step: int) -> int:
        def settled() -> bool:  # committed, or deleted by process 0 because it failed there
            return step in self._store.marked() or not self._store.path(step).exists()

        _await(settled, self._timeout, f"process 0 did not commit it within {self._timeout:.0f} s")
        return self._store.marker(step)["bytes"]

    def _tidied(self, step: int, error: Exception) -> str:
        """Deletes what a try left, which also frees its space, and says in one line why it failed."""
        reason = reason_of(error)
        if not self._first:
            return reason
        try:
            self._store.clean(step)
            if jax.process_count() == 1 and self._store.path(step).exists():
                self._store.delete(str(step))  # its marker is there, but may not be on the disk
        except OSError as second:
            reason += f" (and its leavings stay: {second.strerror or second})"
        return reason

    def _give_up(self, step: int, reason: str, tries: int) -> None:
        self.reason = reason
        try:
            self.newest = self._store.latest()
        except OSError:  # the folder itself cannot be read: the reason says so
            self.newest = None
        self._report(Failed(step, reason, self.newest, tries))


def content_of(step: int, saved: Tensors, manifest: dict[str, Any], metrics: dict[str, float] | None) -> dict[str, Any]:
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


def nothing(*_: object) -> None:
    """Nothing is to be done."""
