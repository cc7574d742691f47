"""Writer of checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import jax

from jaxtrain.checkpoint import orbax
from jaxtrain.checkpoint.durable import DurableFetcher, open_tier
from jaxtrain.checkpoint.durable_copy import DurableCopier
from jaxtrain.checkpoint.events import SLOW, SetAside, SlowSave
from jaxtrain.checkpoint.files import Lock, failure_reason
from jaxtrain.checkpoint.multi_process_saving import MultiProcessSaver
from jaxtrain.checkpoint.reader import CheckpointReader
from jaxtrain.checkpoint.saving import PendingSave, Saver, marker_content, no_op
from jaxtrain.checkpoint.state_tree import copy_to_host, flatten_arrays, nest, tensor_specs
from jaxtrain.checkpoint.store import FencedStore, Retention
from jaxtrain.distributed.kv_store import KeyValueStore
from jaxtrain.distributed.multihost import barrier, broadcast, first_message
from jaxtrain.distributed.save_fence import SaveFence
from jaxtrain.errors import CheckpointError
from jaxtrain.io.retry import RETRY_DELAYS

NO_FILES: Mapping[str, str] = MappingProxyType({})


class Checkpointer(CheckpointReader):
    """Saves asynchronous, sharded, atomic checkpoints, and prunes old ones. The only writer of its folder.

    Opening it deletes what a crash left: temporaries, half-deleted steps, steps without marker. `restore` and
    `latest_good` wait for the save in progress, read both tiers and rename a damaged newest step to `bad-N`.

    Args:
      directory: folder of the checkpoints; created if absent. A lock refuses a second writer.
      keep: number of newest checkpoints to keep (at least 1), in each tier.
      keep_best: number of further checkpoints to keep, lowest in `best` first.
      best: name of a metric given to `save`.
      timeout: seconds that the processes wait for one another at a commit, and a save for the previous one.
      waits: seconds between the tries of a failing save or copy.
      durable: folder or URL of a second tier of this run alone, to which committed steps are copied.
      durable_every: steps between these copies; None: every committed step.
      fence: right of this generation of a launched job to save; None without a consensus store.

    Attributes:
      retention: checkpoints that stay in each tier; may be changed before the first save.

    Raises:
      CheckpointError: another process writes to the folder.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: int = 0,
        best: str | None = None,
        timeout: float = 300.0,
        waits: Sequence[float] = RETRY_DELAYS,
        durable: str | None = None,
        durable_every: int | None = None,
        fence: SaveFence | None = None,
    ) -> None:
        super().__init__(directory)
        if fence is not None:
            self.store = FencedStore(directory, fence)
        orbax.hide_failed_writes()
        self.retention, self._timeout = Retention(keep, keep_best, best), timeout
        self._is_first, self._is_alone = jax.process_index() == 0, jax.process_count() == 1
        self._has_tier, self._has_reported_slow = durable is not None, False
        self._copier: DurableCopier | None = None
        self._durable: DurableFetcher | None = None
        report = self._events.append
        if durable is not None and self._is_first:
            tier = open_tier(durable)
            self._copier = DurableCopier(self.store, tier, durable_every, self.retention, waits, report)
            self._durable = DurableFetcher(self.store, tier, report)
        hooks = (waits, report, self._prune, no_op if self._copier is None else self._copier.offer)
        if self._is_alone:
            self._saver = Saver(self.store, *hooks)
        else:
            number = broadcast(time.time_ns() % 2**31)  # tells it from other checkpointers of these processes
            messages = KeyValueStore(f"jaxtrain/save/{number}")
            self._saver = MultiProcessSaver(self.store, timeout, messages, *hooks)
        self._lock: Lock | None = None
        problem = None
        if self._is_first:
            try:
                self._open()
            except (CheckpointError, OSError) as error:
                problem = str(error)
        if problem := first_message(problem):
            raise CheckpointError(problem)
        self._is_open = True

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = Lock(self.directory / ".lock", self.store.holder)
        except CheckpointError as error:
            # An earlier generation of this job may hold it, in a process that does not run. Its saves do not count.
            if not self.store.holder or self.store.holder not in str(error):
                raise
        self.store.open()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """Waits for the save and the copy in progress, and frees the lock."""
        self.wait()
        self._saver.cancel_retry()
        if self._copier is not None:
            self._copier.close()
        self._is_open = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def folder_problem(self) -> str | None:
        """Describes why the folder is not this run's any more, or returns None; always None but on process 0."""
        return None if self._lock is None else self._lock.problem()

    def give_up(self) -> None:
        """Lets a save that fails try no more, so that `close` does not wait for it."""
        self._saver.stop_retrying()

    def wait(self) -> None:
        """Blocks until no save is in progress. `poll` returns its outcome."""
        self._saver.wait()

    def finish(self) -> None:
        """Blocks until the last save has ended with all its retries, and the durable tier has the newest step."""
        self.wait()
        while self._saver.retry_last():
            self.wait()
        if self._copier is not None and (newest := self.store.latest()) is not None:
            self._copier.finish(newest)
        if self._has_tier:
            barrier()

    def is_empty(self) -> bool:
        """Returns whether neither tier has a step, good or damaged. The same on every process.

        Raises:
          CheckpointError: the folder is empty and the durable tier cannot be listed.
        """
        is_empty, problem = True, None
        if self._is_first:
            is_empty = not self.store.marked()
            try:
                is_empty = is_empty and (self._durable is None or self._durable.is_empty())
            except CheckpointError as error:
                problem = str(error)
        if problem := first_message(problem):
            raise CheckpointError(problem)
        return broadcast(int(is_empty)) == 1

    def origin(self, step: int) -> str:
        """Returns where a restored step came from: the run's folder, or the durable tier."""
        durable = self._durable
        return durable.location if durable is not None and step in durable.fetched else str(self.directory)

    def save(
        self,
        step: int,
        state: Any,
        *,
        manifest: dict[str, Any],
        metrics: dict[str, float] | None = None,
        files: Mapping[str, str] = NO_FILES,
        copy: bool = True,
    ) -> bool:
        """Starts a save; the state may be donated to the next step as soon as this returns.

        With one process the copy to the host is dispatched, not waited for; with several, orbax copies this process's
        shards before it returns. It waits for a previous save that is being written. A previous save that failed and
        waits for its retry is given up instead. Disk errors are events (`Retrying`, `SaveFailed`), and never affect
        earlier steps. A single process retries by itself, with the same values. Several processes retry together on
        their main threads, when `is_retry_due` says so, with the state of that step.

        Args:
          step: optimizer step of the state.
          state: pytree of jax.Arrays with any shardings; each process writes its shards (of replica 0).
          manifest: JSON-able description of the run for `restore`.
          metrics: finite numbers by which `keep_best` ranks.
          files: {name: text} of further files of this process, see `files.DATA_FILE`.
          copy: False if nobody donates the state before `wait` returns (one process): it is written without a copy.

        Returns:
          False if this step is already committed, or was skipped because the previous save hangs.

        Raises:
          CheckpointError: closed, not JSON-able, not jax.Arrays, or behind the newest checkpoint (see `rewind`).
        """
        begun = time.perf_counter()
        if not self._is_open:
            raise CheckpointError(f"checkpoint {step} cannot be saved: {self.directory} is closed")
        arrays = flatten_arrays(state)
        content = marker_content(step, tensor_specs(state), manifest, metrics)
        if not self._wait_for_previous(step, begun):
            return False
        waited = time.perf_counter() - begun
        tries, scheduled_step = self._saver.begin(step)
        prepare = partial(self._clear, step) if self._is_alone else no_op
        save = PendingSave(
            step, content, prepare, no_op, begun, waited=waited, tries=tries, scheduled_step=scheduled_step
        )
        again = partial(self.save, step, state, manifest=manifest, metrics=metrics, files=files)
        self._saver.hold_for_retry(list(arrays.values()), again)
        if not self._should_write(save):
            return False
        try:
            save.folder, write = self._start_writing(step, arrays, copy)
            save.write = partial(_write_all, write, save.folder, files)
        except Exception as error:  # errors of orbax and the file system are reported, and training continues
            if self._is_alone:
                self._saver.fail(save, failure_reason(error))
                return True
            save.write = partial(_raise, error)  # only this process may have failed: its thread tells the others
        self._saver.start(save)
        return True

    def is_retry_due(self, step: int) -> bool:
        """Returns whether the state after `step` must be saved because a save failed; the same on every process.

        Every process calls it after every step at which no save is due. It costs nothing until a save has failed.
        Always False with one process.
        """
        return self._saver.is_retry_due(step)

    def rewind(self, step: int) -> list[int]:
        """Renames the committed steps after `step` to `old-N`, so that training can continue from it.

        They are deleted once a step as late as theirs is saved again. The same in the durable tier; an object store
        cannot rename, so there they are deleted at once.

        Returns:
          the renamed steps.
        """
        self.wait()
        self._saver.cancel_retry()
        if self._copier is not None and self._durable is not None:
            self._copier.wait()
            self._durable.discard_after(step)
        later = self.store.set_aside_after(step) if self._is_first else {}
        for abandoned, path in later.items():
            self._events.append(SetAside(abandoned, f"training continues from step {step}", str(path)))
        barrier()
        return list(later)

    def latest_damaged(self) -> int | None:
        """Returns the newest step that was set aside as damaged, or None. The same on every process."""
        steps = [step for step, name in self.store.aside() if name.startswith("bad-")] if self._is_first else []
        newest = broadcast(max(steps, default=-1))
        return None if newest < 0 else newest

    def fetch(self) -> None:
        """Copies the newest step of the durable tier into the folder, checked, if it is newer than those there."""
        self._fetch_missing(None)

    def _fetch_missing(self, step: int | None) -> None:
        """Waits for the save in progress, then fetches `step`, or a newer step, from the durable tier."""
        self.wait()
        if self._durable is not None and (fetched := self._durable.fetch(step)) is not None:
            self._rejected.discard(fetched)
        if self._has_tier:
            barrier()

    def _reject(self, step: int, problem: str) -> None:
        path = str(self.store.set_aside(step, "bad")) if self._is_first else None
        barrier()  # no process lists the steps before it is renamed
        self._rejected.add(step)
        self._events.append(SetAside(step, problem, path))

    def _wait_for_previous(self, step: int, begun: float) -> bool:
        """Waits for the previous save. Returns False on every process if it takes longer than the timeout on one."""
        self._saver.stop_retrying()
        late = None if self._saver.wait(self._timeout) else "late"
        waited = time.perf_counter() - begun
        if first_message(late):
            self._events.append(SlowSave(step, self._saver.step, waited, skipped=True))
            return False
        if waited >= SLOW and self._saver.is_saved and not self._has_reported_slow:
            self._has_reported_slow = True
            self._events.append(SlowSave(step, self._saver.step, waited))
        return True

    def _should_write(self, save: PendingSave) -> bool:
        """Returns whether to write a save: not if its step is committed or the folder fails. The same everywhere."""
        step, newest, failure = save.step, -1, None
        if self._is_first:
            try:
                newest = self._newest()
                if newest < step and not self._is_alone:
                    self._clear(step)
            except OSError as error:
                failure = error
        newest = broadcast(newest)
        if self._is_alone and failure:
            return True  # the thread of the save meets the error again, and retries
        if reason := first_message(failure_reason(failure) if failure else None):
            save.tries = broadcast(save.tries)
            self._saver.fail(save, reason)
            return False
        if newest > step:
            raise _behind(step, newest)
        self._rejected.discard(step)
        return newest != step

    def _newest(self) -> int:
        newest = self.store.latest()
        return -1 if newest is None else newest

    def _clear(self, step: int) -> None:
        """Clears the folder of a step: deletes the remains of a failed save, sets a damaged step aside."""
        if (newest := self._newest()) >= step:
            raise _behind(step, newest)
        self._check_folder()
        self.store.clean(step)
        if self.store.path(step).exists():
            reason = self.store.problem(step) or "it is saved again"
            self._events.append(SetAside(step, reason, str(self.store.set_aside(step, "bad"))))

    def _start_writing(self, step: int, arrays: dict[str, jax.Array], copy: bool) -> tuple[Path, Callable[[], None]]:
        """Copies the arrays to the host. Returns this process's folder, and what writes them or waits for the end."""
        path = self.store.writing_path(step)
        if not self._is_alone:
            part = orbax.start(path, nest(arrays), self._timeout, self._saver.await_others)
            return path if self._is_first else part.folder, part.result
        tree = nest(copy_to_host(arrays) if copy else arrays)

        def write() -> None:
            orbax.write(path, tree, self._timeout)
            self._check_folder()

        return path, write

    def _check_folder(self) -> None:
        """Raises CheckpointError if the folder was moved or deleted: orbax would make another one in its place."""
        if self._is_alone and (problem := self.folder_problem()):
            raise CheckpointError(problem)

    def _prune(self) -> list[int]:
        """Deletes steps beyond the limit and returns them; and those that a rewind left, once a later one is saved."""
        self.store.delete_abandoned()
        return self.store.prune(self.retention, held=() if self._copier is None else self._copier.held())


def _write_all(write: Callable[[], None], folder: Path, files: Mapping[str, str]) -> None:
    """Waits until the state is written, and adds files to its folder."""
    write()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _raise(error: Exception) -> None:
    raise error


def _behind(step: int, newest: int) -> CheckpointError:
    text = f"checkpoint {step} is behind the newest one ({newest})"
    return CheckpointError(f"{text}; expected rewind({step}) before, to continue from there")
