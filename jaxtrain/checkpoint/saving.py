"""Saves in the background: data, checksums, marker; tried again where that fails, while training goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxtrain.checkpoint.events import Committed, Event, Retrying, SaveFailed
from jaxtrain.checkpoint.files import FORMAT, fsync_folders, reason_of, seal, step_files, write_marker
from jaxtrain.checkpoint.snapshot import Tensors
from jaxtrain.checkpoint.store import CheckpointStore
from jaxtrain.errors import CheckpointError
from jaxtrain.io.retry import RetryError, retry


@dataclass
class Save:
    """A save in flight.

    Attributes:
      content: the marker, so far.
      prepare: makes way for the step, before each try; raises what stands in it.
      write: returns when this process's part is on disk under its final name.
      begun: `time.perf_counter()` when it was asked for.
      tries: which try this is.
      turn: step that the first try was of; later than that only with several processes.
    """

    step: int
    content: dict[str, Any]
    prepare: Callable[[], None]
    write: Callable[[], None]
    begun: float
    stall: float = 0.0
    waited: float = 0.0
    tries: int = 1
    turn: int = -1
    files: dict[str, Any] = field(default_factory=dict)
    is_writing: bool = False


class Saver:
    """Runs one save at a time in a thread of its own. Whatever fails there is an event, never an exception.

    Args:
      waits: seconds between tries.
      report: takes events, from the thread.
      collect: called on process 0 after a commit; returns the older steps it has deleted.
      offer: called on process 0 with a committed step and the step whose turn it was, after its event.
    """

    def __init__(
        self,
        store: CheckpointStore,
        waits: Sequence[float],
        report: Callable[[Event], None],
        collect: Callable[[], list[int]],
        offer: Callable[[int, int], object],
    ) -> None:
        self._store, self._waits = store, tuple(waits)
        self._report, self._collect, self._offer = report, collect, offer
        self._first = jax.process_index() == 0
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self.step = -1  # of the save in flight, or of the last one
        self.is_saved = False  # whether the last one was committed

    def start(self, save: Save) -> None:
        """Begins a save; there must be none in flight."""
        self.step, self.is_saved = save.step, False
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

    def take_over(self, step: int) -> tuple[int, int]:
        """Returns (number of the try, step that the first one was of) of a save that begins now. No other is tried
        again.
        """
        return 1, step

    def keep(self, arrays: Sequence[jax.Array], save: Callable[[], bool]) -> None:
        """Takes what `repeats` needs of a save that begins now."""

    def is_due(self, done: int) -> bool:
        """Returns whether the caller has to save again after `done` steps: never, a thread retries failed saves."""
        return False

    def repeats(self) -> bool:
        """Returns whether the save that was kept begins again, because it failed: never, a thread has done so."""
        return False

    def drop(self) -> None:
        """Gives up the retry that the caller was to make."""

    def fail(self, save: Save, reason: str) -> None:
        """Reports a save that could not begin; what it left is deleted."""
        self._give_up(save.step, self._tidied(save.step, reason), 1)

    def _run(self, save: Save) -> None:
        """The thread of one save."""

        def again(reason: str, wait: float, number: str) -> None:
            save.tries += 1
            self._report(Retrying(save.step, reason, wait, number))

        try:
            size = retry(
                lambda: self._attempt(save),
                self._waits,
                self._hurry,
                lambda error: self._tidied(save.step, reason_of(error)) if save.is_writing else reason_of(error),
                again,
            )
        except RetryError as error:
            self._give_up(save.step, error.reason, error.tries)
            return
        finally:
            save.write = nothing  # frees the host copy
        self._committed(save, size)

    def _attempt(self, save: Save) -> int:
        """Writes, seals and commits. Returns the bytes of the step."""
        save.is_writing = False
        save.prepare()
        save.is_writing = True
        save.write()
        self._seal(save)
        return self._commit(save)

    def _seal(self, save: Save) -> None:
        """Checksums of the files this process wrote."""
        folder, index, count = self._store.path(save.step), jax.process_index(), jax.process_count()
        save.files = seal(folder, [name for name in step_files(folder) if _writer(name, count) == index])

    def _commit(self, save: Save) -> int:
        """Fsyncs the folders and writes the marker. Returns the bytes of the step, of all processes."""
        folder = self._store.path(save.step)
        size = sum(size for size, _ in save.files.values())
        fsync_folders(folder)
        write_marker(folder, save.content | {"files": save.files, "bytes": size})
        return size

    def _committed(self, save: Save, size: int) -> None:
        """Collects garbage and reports."""
        try:
            deleted = self._collect() if self._first else []
        except OSError as error:
            self._report(SaveFailed(save.step, f"saved, but older ones cannot be deleted: {error}", save.step))
            deleted = []
        self.is_saved = True
        seconds = time.perf_counter() - save.begun
        self._report(Committed(save.step, size, seconds, save.stall, save.waited, tuple(deleted), save.tries))
        if self._first:
            self._offer(save.step, save.turn)

    def _tidied(self, step: int, reason: str) -> str:
        """Deletes what a try left, which also frees its space. Returns why it failed, in one line."""
        if not self._first:
            return reason
        try:
            self._store.clean(step)
            if self._store.path(step).exists():
                self._store.delete(str(step))  # its marker is there, but may not be on the disk
        except OSError as second:
            reason += f" (and its leavings stay: {second.strerror or second})"
        return reason

    def _give_up(self, step: int, reason: str, tries: int) -> None:
        try:
            newest = self._store.latest()
        except OSError:  # the folder itself cannot be read: the reason says so
            newest = None
        self._report(SaveFailed(step, reason, newest, tries))


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


def nothing(*_: object) -> None:
    """Nothing is to be done."""
