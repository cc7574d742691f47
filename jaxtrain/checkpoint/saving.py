"""Background saves: data, checksums, marker; a failed save is retried while training continues."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.events import Committed, Event, Retrying, SaveFailed
from jaxtrain.checkpoint.files import (
    FORMAT,
    TensorSpecs,
    failure_reason,
    flush_and_digest,
    fsync_folders,
    step_files,
    write_marker,
)
from jaxtrain.checkpoint.store import CheckpointStore
from jaxtrain.errors import CheckpointError
from jaxtrain.io.retry import RetryError, retry


@dataclass
class PendingSave:
    """A save in progress.

    Attributes:
      step: optimizer step of the state.
      content: the marker without its files.
      prepare: clears the step's folder before each try; raises if it cannot.
      write: returns when this process's part is written; on process 0 when the step has its final name.
      begun: `time.perf_counter()` when `save` was called.
      stall: seconds that `save` blocked its caller.
      waited: seconds of `stall` spent waiting for the previous save.
      tries: number of the current try, from 1.
      scheduled_step: step of the first try; earlier than `step` only with several processes.
      folder: folder of this process's files once `write` has returned.
      files: {name: (size, digest)} of the files written so far.
      is_writing: whether the current try may have written files.
    """

    step: int
    content: dict[str, Any]
    prepare: Callable[[], None]
    write: Callable[[], None]
    begun: float
    stall: float = 0.0
    waited: float = 0.0
    tries: int = 1
    scheduled_step: int = -1
    folder: Path = Path()
    files: dict[str, Any] = field(default_factory=dict)
    is_writing: bool = False


class Saver:
    """Runs one save at a time in a background thread. A failure there is an event, never an exception.

    Args:
      store: folder of the checkpoints.
      waits: seconds between tries.
      report: receives events; called in the thread.
      prune: called on process 0 after a commit; deletes older steps and returns them.
      copy: called on process 0 after a commit with the step and its scheduled step.
    """

    def __init__(
        self,
        store: CheckpointStore,
        waits: Sequence[float],
        report: Callable[[Event], None],
        prune: Callable[[], list[int]],
        copy: Callable[[int, int], object],
    ) -> None:
        self._store, self._waits = store, tuple(waits)
        self._report, self._prune, self._copy = report, prune, copy
        self._is_first = jax.process_index() == 0
        self._thread: threading.Thread | None = None
        self._no_retry = threading.Event()
        self.step = -1  # of the current or last save
        self.is_saved = False  # whether the last save was committed

    def start(self, save: PendingSave) -> None:
        """Starts a save; none may be in progress."""
        self.step, self.is_saved = save.step, False
        self._no_retry.clear()
        # A daemon, because a thread that hangs in a dead file system must not keep a finished program alive.
        self._thread = threading.Thread(target=self._run, args=(save,), name=f"checkpoint-{save.step}", daemon=True)
        save.stall = time.perf_counter() - save.begun
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until no save is in progress, at most `timeout` seconds; returns whether there is none."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def stop_retrying(self) -> None:
        """Lets the save in progress finish its current try but start no other, because a newer save waits."""
        self._no_retry.set()

    def begin(self, step: int) -> tuple[int, int]:
        """Returns (number of the try, scheduled step) of a save that begins now. Cancels any other pending retry."""
        return 1, step

    def hold_for_retry(self, arrays: Sequence[jax.Array], save: Callable[[], bool]) -> None:
        """Stores what `retry_last` needs of a save that begins now."""

    def is_retry_due(self, step: int) -> bool:
        """Returns whether the caller must save after `step`; never here, because the thread retries by itself."""
        return False

    def retry_last(self) -> bool:
        """Starts the last save again if it failed; never here, because the thread retries by itself."""
        return False

    def await_others(self) -> None:
        """Blocks until the other processes have written their parts; here there are none."""

    def cancel_retry(self) -> None:
        """Gives up a retry that the caller would start."""

    def fail(self, save: PendingSave, reason: str) -> None:
        """Reports a save that could not start, and deletes its remains."""
        self._give_up(save.step, self._clean_up(save.step, reason), 1)

    def _run(self, save: PendingSave) -> None:
        """Body of the thread of one save."""

        def describe(error: Exception) -> str:
            reason = failure_reason(error)
            return self._clean_up(save.step, reason) if save.is_writing else reason

        def report_retry(reason: str, wait: float, number: str) -> None:
            save.tries += 1
            self._report(Retrying(save.step, reason, wait, number))

        try:
            size = retry(lambda: self._attempt(save), self._waits, self._no_retry, describe, report_retry)
        except RetryError as error:
            self._give_up(save.step, error.reason, error.tries)
            return
        finally:
            save.write = no_op  # frees the host copy
        self._finish(save, size)

    def _attempt(self, save: PendingSave) -> int:
        """Writes, seals and commits. Returns the bytes of the step."""
        save.is_writing = False
        save.prepare()
        save.is_writing = True
        save.write()
        self._seal(save)
        return self._commit(save)

    def _seal(self, save: PendingSave) -> None:
        """Flushes and digests the files that this process wrote."""
        save.files = flush_and_digest(save.folder, self._own_files(save.folder))

    def _own_files(self, folder: Path) -> list[str]:
        """Lists the files of a step that this process wrote, by name."""
        return step_files(folder)

    def _commit(self, save: PendingSave) -> int:
        """Flushes the folders, writes the marker, publishes the step. Returns its bytes, of all processes."""
        folder = self._store.writing_path(save.step)
        size = sum(size for size, _ in save.files.values())
        fsync_folders(folder)
        write_marker(folder, save.content | {"files": save.files, "bytes": size})
        self._store.publish(save.step)
        return size

    def _finish(self, save: PendingSave, size: int) -> None:
        """Prunes older steps, reports the commit and passes the step on to be copied."""
        try:
            deleted = self._prune() if self._is_first else []
        except OSError as error:
            self._report(SaveFailed(save.step, f"saved, but older ones cannot be deleted: {error}", save.step))
            deleted = []
        self.is_saved = True
        seconds = time.perf_counter() - save.begun
        self._report(Committed(save.step, size, seconds, save.stall, save.waited, tuple(deleted), save.tries))
        if self._is_first:
            self._copy(save.step, save.scheduled_step)

    def _clean_up(self, step: int, reason: str) -> str:
        """Deletes the remains of a failed try, which also frees its space. Returns the reason of the failure."""
        if not self._is_first:
            return reason
        try:
            self._store.clean(step)
            self._store.discard(step)  # its marker may exist, but not on the disk
        except OSError as error:
            reason += f" (and its files cannot be deleted: {error.strerror or error})"
        return reason

    def _give_up(self, step: int, reason: str, tries: int) -> None:
        try:
            newest = self._store.latest()
        except OSError:  # the folder cannot be read either, as the reason says
            newest = None
        self._report(SaveFailed(step, reason, newest, tries))


def marker_content(
    step: int, tensors: TensorSpecs, manifest: dict[str, Any], metrics: dict[str, float] | None
) -> dict[str, Any]:
    """Returns a marker without its files. Raises CheckpointError if manifest or metrics are not JSON-able."""
    content = {
        "format": FORMAT, "step": step, "time": time.time(), "bytes": 0, "files": {},
        "tensors": tensors, "manifest": manifest, "metrics": metrics or {},
    }  # fmt: skip
    try:
        return json.loads(json.dumps(content))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {step}: manifest and metrics must be JSON-able ({error})") from None


def no_op(*_: object) -> None:
    """Does nothing."""
