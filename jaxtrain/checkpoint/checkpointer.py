"""Saving the train state. `Checkpointer` is the one writer of a run's folder of checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import jax

from jaxtrain.checkpoint import orbax
from jaxtrain.checkpoint.durable import Comeback, open_tier
from jaxtrain.checkpoint.durable_copy import Copier
from jaxtrain.checkpoint.events import SLOW, SetAside, SlowSave
from jaxtrain.checkpoint.files import Lock, reason_of
from jaxtrain.checkpoint.joint_saving import JointSaver
from jaxtrain.checkpoint.reader import Reader
from jaxtrain.checkpoint.saving import Save, Saver, content_of, nothing
from jaxtrain.checkpoint.snapshot import named_arrays, nest, snapshot, tensors
from jaxtrain.distributed.agreement import agreed, first_text
from jaxtrain.distributed.kv_store import Notes
from jaxtrain.errors import CheckpointError
from jaxtrain.io.retry import RETRY_DELAYS

__all__ = ["Checkpointer", "Reader"]


class Checkpointer(Reader):
    """The one writer of a folder of checkpoints: asynchronous, sharded, atomic, with its own garbage collection.

    Args:
      directory: created when absent. A lock refuses a second writer.
      keep: newest checkpoints kept (at least 1), in each tier.
      keep_best: checkpoints kept besides, lowest in `best` first.
      best: name of a metric given to `save`.
      timeout: seconds the processes wait for one another at a commit, and a save for the one before it.
      waits: seconds between the tries of a save, or of a copy, that fails.
      durable: folder or URL of a second tier for this run alone, which committed steps are copied to.
      durable_every: steps between these copies; None: every committed step.

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
        waits: Sequence[float] = RETRY_DELAYS,
        durable: str | None = None,
        durable_every: int | None = None,
    ) -> None:
        super().__init__(directory)
        self._kept, self._timeout = (keep, keep_best, best), timeout
        self._first, self._is_alone = jax.process_index() == 0, jax.process_count() == 1
        self._has_tier, self._is_slow_told = durable is not None, False
        self._copier: Copier | None = None
        self._comeback: Comeback | None = None
        if durable is not None and self._first:
            tier, report = open_tier(durable), self._events.append
            self._copier = Copier(self.store, tier, durable_every, self._kept, waits, report)
            self._comeback = Comeback(self.store, tier, report)
        offer = nothing if self._copier is None else self._copier.offer
        hooks = (waits, self._events.append, self._collect, offer)
        self._saver = Saver(self.store, *hooks) if self._is_alone else self._joint_saver(*hooks)
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

    def _joint_saver(self, *hooks: Any) -> Saver:
        name = agreed(time.time_ns() % 2**31)  # of this one, whatever others these processes have had
        return JointSaver(self.store, self._timeout, Notes(f"jaxtrain/save/{name}"), *hooks)

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.directory / ".lock")
        self.store.clean()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """Waits for the save and the copy in flight and frees the lock."""
        self.wait()
        self._saver.drop()
        if self._copier is not None:
            self._copier.close()
        self._is_open = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def wait(self) -> None:
        """Blocks until no save is in flight. How it went is in `poll`."""
        self._saver.wait()

    def finish(self) -> None:
        """`wait`, further tries included, and until the durable tier has the newest step, or refused it."""
        self.wait()
        while self._saver.repeats():
            self.wait()
        if self._copier is not None and (newest := self.store.latest()) is not None:
            self._copier.finish(newest)
        if self._has_tier:
            agreed(0)

    def is_empty(self) -> bool:
        """Returns whether neither tier holds a step, good or damaged. The same on every process.

        Raises CheckpointError when the folder is empty and nobody can tell what the durable tier holds.
        """
        is_empty, unknown = True, None
        if self._first:
            is_empty = not self.store.marked()
            try:
                is_empty = is_empty and (self._comeback is None or self._comeback.is_empty())
            except CheckpointError as error:
                unknown = str(error)
        if unknown := first_text(unknown):
            raise CheckpointError(unknown)
        return agreed(int(is_empty)) == 1

    def origin(self, step: int) -> str:
        """Place a restored step came from: the run's folder, or the durable tier."""
        comeback = self._comeback
        return comeback.place if comeback is not None and step in comeback.fetched else str(self.directory)

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
        before it returns. Either way a save still being written is waited for first; one that failed and waits to be
        tried again gives way to this one. Disk errors come through `poll`, as `Retrying` and `SaveFailed`, and never
        touch
        earlier steps. One process tries again by itself, with the same values. Several processes begin together, on
        their main threads: when `saves_again` says so, with the state as it is then.

        Args:
          step: optimizer step of the state.
          state: pytree of jax.Arrays, any shardings; each process writes the shards it holds (of replica 0).
          manifest: what a resumed run needs to know (`promise.environment`); JSON-able.
          copied: False: one process, whose state nobody donates before `wait` returns, is written as it lies.
          metrics: finite numbers that rank `keep_best`; JSON-able.

        Returns: False when this step is already committed, or was left out because the save before it hangs.

        Raises:
          CheckpointError: closed, not JSON-able, not jax.Arrays, or behind the newest checkpoint (see `rewind`).
        """
        begun = time.perf_counter()
        if not self._is_open:
            raise CheckpointError(f"checkpoint {step} cannot be saved: {self.directory} is closed")
        flat = named_arrays(state)
        content = content_of(step, tensors(state), manifest, metrics)
        if not self._is_free(step, begun):
            return False
        waited = time.perf_counter() - begun
        tries, turn = self._saver.take_over(step)
        prepare = partial(self._make_way, step) if self._is_alone else nothing
        save = Save(step, content, prepare, nothing, begun, waited=waited, tries=tries, turn=turn)
        self._saver.keep(list(flat.values()), partial(self.save, step, state, manifest=manifest, metrics=metrics))
        if not self._admits(save):
            return False
        try:
            save.write = self._writer(step, flat, copied)
        except Exception as error:  # whatever orbax or the file system raises is reported, and training goes on
            if self._is_alone:
                self._saver.fail(save, reason_of(error))
                return True
            save.write = partial(_raise, error)  # of several processes, where it may be the only one
        self._saver.start(save)
        return True

    def saves_again(self, done: int) -> bool:
        """Returns whether the state after `done` steps is to be saved because a save failed; the same on every process.

        Every process asks after every step at which it would not save anyway. Costs nothing until a save has failed.
        Always False with one process.
        """
        return self._saver.is_due(done)

    def rewind(self, step: int) -> list[int]:
        """Renames the committed steps after `step` to `old-N`, so that training goes on from it. Returns them.

        In the durable tier too, where an object store has no names to change and they are deleted.
        """
        self.wait()
        self._saver.drop()
        newer = [known for known in self.store.marked() if known > step] if self._first else []
        if self._copier is not None and self._comeback is not None:
            self._copier.wait()
            self._comeback.forget(step)
        for known in newer:
            path = self.store.set_aside(known, "old")
            self._events.append(SetAside(known, f"training goes on from step {step}", str(path)))
        agreed(0)
        return newer

    def restore(
        self, step: int | None, abstract_state: Any, *, partial: bool = False, verify: bool = True
    ) -> tuple[Any, dict[str, Any]]:
        """Does what `Reader.restore` does, after the save in flight, of either tier; a damaged newest step is renamed
        `bad-N`.
        """
        self.wait()
        return super().restore(step, abstract_state, partial=partial, verify=verify)

    def choose(self) -> int | None:
        """Chooses like `Reader.choose`, after the save in flight, of either tier; a damaged step is renamed `bad-N`."""
        self.wait()
        return super().choose()

    def damaged(self) -> int | None:
        """The latest step that was set aside as damaged, None where none was. The same on every process."""
        steps = [step for step, name in self.store.aside() if name.startswith("bad-")] if self._first else []
        found = agreed(max(steps, default=-1))
        return None if found < 0 else found

    def fetch(self) -> None:
        """Brings the newest step of the durable tier here, checked, where the folder has none as new."""
        self._supply(None)

    def _supply(self, step: int | None) -> None:
        if self._comeback is not None and (fetched := self._comeback.supply(step)) is not None:
            self._passed.discard(fetched)
        if self._has_tier:
            agreed(0)

    def _reject(self, step: int, problem: str) -> None:
        path = None
        if self._first:
            path = str(self.store.set_aside(step, "bad"))
        agreed(0)  # nobody looks before it is renamed
        self._passed.add(step)
        self._events.append(SetAside(step, problem, path))

    def _is_free(self, step: int, begun: float) -> bool:
        """Waits for the save before; False, the same on every process, where it takes longer than the timeout."""
        self._saver.hurry()
        late = None if self._saver.wait(self._timeout) else "late"
        waited = time.perf_counter() - begun
        if first_text(late):
            self._events.append(SlowSave(step, self._saver.step, waited, skipped=True))
            return False
        if waited >= SLOW and self._saver.is_saved and not self._is_slow_told:
            self._is_slow_told = True
            self._events.append(SlowSave(step, self._saver.step, waited))
        return True

    def _admits(self, save: Save) -> bool:
        """Returns whether a save of this step is due; the same on every process."""
        step, newest, broken = save.step, -1, None
        if self._first:
            try:
                newest = self._newest()
                if newest < step and not self._is_alone:
                    self._make_way(step)
            except OSError as error:
                broken = error
        newest = agreed(newest)
        if self._is_alone and broken:
            return True  # the thread of the save meets it again, and tries again
        if reason := first_text(reason_of(broken) if broken else None):
            save.tries = agreed(save.tries)
            self._saver.fail(save, reason)
            return False
        if newest > step:
            raise _behind(step, newest)
        self._passed.discard(step)
        return newest != step

    def _newest(self) -> int:
        newest = self.store.latest()
        return -1 if newest is None else newest

    def _make_way(self, step: int) -> None:
        """Leavings of a failed save are deleted, a step with a damaged marker is set aside."""
        if (newest := self._newest()) >= step:
            raise _behind(step, newest)
        self.store.clean(step)
        if self.store.path(step).exists():
            reason = self.store.problem(step) or "it is saved anew"
            self._events.append(SetAside(step, reason, str(self.store.set_aside(step, "bad"))))

    def _writer(self, step: int, flat: dict[str, jax.Array], copied: bool) -> Callable[[], None]:
        path = self.store.path(step)
        if not self._is_alone:
            return orbax.start(path, nest(flat), self._timeout).result
        copies = nest(snapshot(flat) if copied else flat)
        return lambda: orbax.write(path, copies, self._timeout)

    def _collect(self) -> list[int]:
        """Garbage collection; returns the deleted steps."""
        return self.store.prune(*self._kept, held=() if self._copier is None else self._copier.held())


def _raise(error: Exception) -> None:
    raise error


def _behind(step: int, newest: int) -> CheckpointError:
    message = f"checkpoint {step} is behind the newest one ({newest}): call rewind({step}) to go on from there"
    return CheckpointError(message)
