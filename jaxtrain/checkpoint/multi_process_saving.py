"""Saves by several processes, and retries that all of them start at the same step.

All processes must call orbax on their main threads in the same order, so they must start a retry at the same step, but
steps must not wait for a collective. Process 0 chooses the step once the pause is over and puts it into the key-value
store; the others look there after each step, but only while a save has failed. `MARGIN` lets them see it in time: the
loop reads the metrics of a step, which need all processes, before it calls `is_retry_due` for the next step. So a
process that calls it after step n knows that process 0 has started step n - 1 and has called it after step n - 2. An
entry that process 0 puts after step c is therefore visible to all that look after step c + 2. Two more steps allow for
two lookups lost by the network.

It would be simpler to count tries and pauses in each process, or to save again after a fixed number of steps. But a
process that wrote its part cannot know by itself that another one failed, nor when.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.events import Retrying
from jaxtrain.checkpoint.files import PART, failure_reason, is_inside, step_files
from jaxtrain.checkpoint.orbax import files_of_process, written_by_another
from jaxtrain.checkpoint.saving import PendingSave, Saver, no_op
from jaxtrain.checkpoint.store import CheckpointStore
from jaxtrain.distributed.agreed_step import AgreedStep
from jaxtrain.distributed.kv_store import KeyValueStore
from jaxtrain.distributed.multihost import broadcast
from jaxtrain.errors import CheckpointError
from jaxtrain.io.atomic import write_atomic

POLL_INTERVAL = 0.02  # seconds between lookups of another process's file


class JointRetry:
    """A failed save that all processes retry at the same step. Every process has one; main thread only.

    Args:
      store: key-value store of this save.
      is_first: whether this is process 0.
      step: step that could not be saved.
      scheduled_step: step of the first try.
      reason: why it failed.
      tries: number of tries so far.
      wait: least seconds until the next try, by the clock of process 0.
    """

    def __init__(
        self, store: KeyValueStore, is_first: bool, step: int, scheduled_step: int, reason: str, tries: int, wait: float
    ) -> None:
        self._agreed = AgreedStep(store, is_first)
        self.step, self.scheduled_step, self.reason, self.tries = step, scheduled_step, reason, tries
        self._due_time = time.monotonic() + wait

    def is_due(self, step: int) -> bool:
        """Returns whether all processes save after `step`. All call it after the same steps, in ascending order."""
        return self._agreed.is_reached(step, may_choose=not self.remaining_wait())

    def matches(self, step: int) -> bool:
        """Returns whether a save of `step` is this retry."""
        return step in (self.step, self._agreed.step)

    def remaining_wait(self) -> float:
        """Returns the seconds until the next try may start."""
        return max(0.0, self._due_time - time.monotonic())


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a save: bytes, or the reason of the failure. `wait`: seconds until it is retried, or None."""

    bytes: int = 0
    reason: str | None = None
    tries: int = 1
    wait: float | None = None


class MultiProcessSaver(Saver):
    """`Saver` of each of several processes. Its thread does not retry a failed save, see `JointRetry`.

    Each process writes and seals its part without waiting for another, and tells process 0 how it ended. Process 0
    waits for all parts, also if its own has failed, so that no process still writes files that are being deleted. It
    merges and commits them, or deletes them, and publishes the outcome for all.

    Args:
      store: folder of the checkpoints.
      timeout: seconds that the processes wait for one another at a commit.
      messages: key-value store that only this saver uses.
      hooks: further arguments of `Saver`.
    """

    def __init__(self, store: CheckpointStore, timeout: float, messages: KeyValueStore, *hooks: Any) -> None:
        super().__init__(store, *hooks)
        self._timeout, self._all_messages = timeout, messages
        self._part_timeout = 2 * timeout  # orbax ends within the timeout; then the files are sealed
        self._index, self._others = jax.process_index(), range(1, jax.process_count())
        self._number = 0  # of the save, the same on every process
        self._messages = messages.child(0)
        self._retry: JointRetry | None = None
        self._last: tuple[Sequence[jax.Array], Callable[[], bool]] | None = None

    def begin(self, step: int) -> tuple[int, int]:
        """Returns (number of the try, scheduled step) of a save that begins now. Cancels any other pending retry."""
        self._open_messages()
        if (pending := self._retry) is not None and pending.matches(step):
            self._retry = None
            return pending.tries + 1, pending.scheduled_step
        self.cancel_retry()
        return 1, step

    def hold_for_retry(self, arrays: Sequence[jax.Array], save: Callable[[], bool]) -> None:
        """Stores the arrays of a save that begins now and the function that saves them."""
        self._last = arrays, save

    def is_retry_due(self, step: int) -> bool:
        """Returns whether all processes save after `step`. Every process calls it."""
        self._last = None  # the state has changed
        return self._retry is not None and self._retry.is_due(step)

    def retry_last(self) -> bool:
        """Starts the last save again on all processes, after its pause, if it failed and its state still exists."""
        if self._last is None:
            return False
        (arrays, save), pending = self._last, self._retry
        is_lost = any(array.is_deleted() for array in arrays)
        milliseconds = broadcast(-1 if pending is None or is_lost else ceil(1000 * pending.remaining_wait()))
        if milliseconds < 0:
            self.cancel_retry()
            return False
        time.sleep(milliseconds / 1000)
        return save()

    def cancel_retry(self) -> None:
        """Gives up the pending retry."""
        pending, self._retry = self._retry, None
        if pending is not None:
            self._give_up(pending.step, pending.reason, pending.tries)

    def fail(self, save: PendingSave, reason: str) -> None:
        """Schedules the retry of a save that could not start. Every process calls it, with the same tries."""
        outcome = self._failure(reason, save.tries)
        self._retry = self._make_retry(save, outcome)
        self._report_failure(save.step, outcome)

    def _open_messages(self) -> None:
        """Opens the messages of the next save; deletes those of the last one."""
        if self._is_first:
            self._messages.clear()
        self._number += 1
        self._messages = self._all_messages.child(self._number)

    def _run(self, save: PendingSave) -> None:
        reason = None
        try:
            save.write()
            self._seal(save)
        except Exception as error:  # orbax and file systems raise errors of many classes
            reason = failure_reason(error)
        finally:
            save.write = no_op  # frees the host copy
        try:
            outcome = self._commit_all(save, reason) if self._is_first else self._await_commit(save, reason)
            if outcome.reason is not None:
                outcome = self._schedule_retry(save, outcome)
        except Exception as error:  # the processes cannot reach one another
            outcome = SaveOutcome(reason=failure_reason(error), tries=save.tries)
        save.tries = outcome.tries
        if outcome.reason is None:
            self._finish(save, outcome.bytes)
        else:
            self._report_failure(save.step, outcome)

    def _seal(self, save: PendingSave) -> None:
        super()._seal(save)
        if not self._is_first:
            write_atomic(save.folder / PART.format(self._index), json.dumps(save.files))

    def _own_files(self, folder: Path) -> list[str]:
        """Lists the files that this process wrote. Only process 0 lists the whole folder, which all of them fill."""
        if self._is_first:
            return [name for name in step_files(folder) if not written_by_another(name)]
        return files_of_process(folder, self._index)

    def await_others(self) -> None:
        """Process 0: blocks until the others have written their parts. Raises CheckpointError if one failed."""
        if reason := self._failure_of_others():
            raise CheckpointError(reason)

    def _commit_all(self, save: PendingSave, reason: str | None) -> SaveOutcome:
        """Process 0: waits for all parts, commits or cleans up, and publishes the outcome."""
        outcome = None
        failed_other = self._failure_of_others()
        reason = reason or failed_other
        if reason is None:
            try:
                outcome = SaveOutcome(self._commit(save), tries=save.tries)
            except Exception as error:
                reason = failure_reason(error)
        if outcome is None:
            outcome = self._failure(self._clean_up(save.step, reason or ""), save.tries)
        self._messages.put("outcome", json.dumps(asdict(outcome)))
        return outcome

    def _await_commit(self, save: PendingSave, reason: str | None) -> SaveOutcome:
        """Other processes: publish how their part ended, and wait for the outcome."""
        self._messages.put(f"part-{self._index}", reason or "")
        text = self._messages.wait("outcome", 2 * self._part_timeout)
        if text is None:
            late = f"process 0 did not commit it within {2 * self._part_timeout:.0f} s"
            return SaveOutcome(reason=late, tries=save.tries)
        return SaveOutcome(**json.loads(text))

    def _failure_of_others(self) -> str | None:
        """Waits until the parts of all other processes have ended. Returns why the first of them failed, or None."""
        deadline, failures = time.monotonic() + self._part_timeout, []
        for index in self._others:
            message = self._messages.wait(f"part-{index}", deadline - time.monotonic())
            if message is None:
                failures.append(f"process {index} did not end its part within {self._part_timeout:.0f} s")
            elif message:
                failures.append(f"process {index}: {message}")
        return failures[0] if failures else None

    def _commit(self, save: PendingSave) -> int:
        """Merges the checksums of all processes, and commits."""
        parts = [self._store.writing_path(save.step) / PART.format(index) for index in self._others]
        for part in parts:
            _wait_until(part.exists, self._timeout, f"{part.name} is not visible to process 0")
            save.files |= {name: entry for name, entry in json.loads(part.read_text()).items() if is_inside(name)}
        if unknown := set(step_files(self._store.writing_path(save.step))) - set(save.files):
            raise CheckpointError(f"checkpoint {save.step}: {min(unknown)} is in no process's list of its files")
        size = super()._commit(save)
        for part in parts:
            (self._store.path(save.step) / part.name).unlink()
        return size

    def _failure(self, reason: str, tries: int) -> SaveOutcome:
        wait = self._waits[tries - 1] if tries <= len(self._waits) else None
        return SaveOutcome(reason=reason, tries=tries, wait=wait)

    def _make_retry(self, save: PendingSave, outcome: SaveOutcome) -> JointRetry | None:
        if outcome.wait is None or outcome.reason is None:
            return None
        return JointRetry(
            self._messages, self._is_first, save.step, save.scheduled_step, outcome.reason, outcome.tries, outcome.wait
        )

    def _schedule_retry(self, save: PendingSave, outcome: SaveOutcome) -> SaveOutcome:
        """Sets the retry once every process has heard of the failure. Returns the outcome that holds then."""
        pending = self._make_retry(save, outcome)
        if pending is None:
            return outcome
        if not self._is_first:
            self._retry = pending
            self._messages.put(f"heard-{self._index}")
            return outcome
        for index in self._others:
            if self._messages.wait(f"heard-{index}", self._timeout) is None:
                return replace(outcome, reason=f"{outcome.reason}, and process {index} does not answer", wait=None)
        self._retry = pending
        return outcome

    def _report_failure(self, step: int, outcome: SaveOutcome) -> None:
        reason, tries = outcome.reason or "", outcome.tries
        if outcome.wait is None:
            self._give_up(step, reason, tries)
        else:
            self._report(Retrying(step, reason, outcome.wait, f"{tries + 1} of {len(self._waits) + 1}"))


def _wait_until(condition: Callable[[], bool], timeout: float, message: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise CheckpointError(f"{message} within {timeout:.0f} s")
        time.sleep(POLL_INTERVAL)
