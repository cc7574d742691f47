"""Background copies of committed steps to the durable tier, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from jaxtrain.checkpoint.durable import DurableTier
from jaxtrain.checkpoint.events import Copied, CopyFailed, Event, Retrying
from jaxtrain.checkpoint.files import failure_reason
from jaxtrain.checkpoint.store import CheckpointStore, Retention, StepInfo, steps_beyond_limit
from jaxtrain.errors import CheckpointError
from jaxtrain.io.retry import RetryError, retry


class DurableCopier:
    """Copies committed steps. Every failure is an event: an unreachable tier costs copies and nothing else.

    Args:
      store: folder of the run's checkpoints.
      tier: receives the copies.
      every: steps between copies; None: every committed step.
      retention: copies that stay.
      waits: seconds between tries.
      report: receives events; called in the thread.
    """

    def __init__(
        self,
        store: CheckpointStore,
        tier: DurableTier,
        every: int | None,
        retention: Retention,
        waits: Sequence[float],
        report: Callable[[Event], None],
    ) -> None:
        self._store, self.tier, self._every, self._retention = store, tier, every, retention
        self._waits, self._report = tuple(waits), report
        self._lock, self._no_retry = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._next: int | None = None
        self._current: int | None = None
        self._last = -1  # the newest step that was tried
        self._is_closing = False

    def offer(self, step: int, scheduled_step: int) -> None:
        """Copies a committed step if a copy is due. It replaces a step that still waits.

        Args:
          step: the committed step.
          scheduled_step: step at which its save was due; it decides whether a copy is due.
        """
        if self._every is None or scheduled_step % self._every == 0:
            self._push(step)

    def held(self) -> set[int]:
        """Returns the steps that must not be deleted yet."""
        with self._lock:
            return {step for step in (self._current, self._next) if step is not None}

    def finish(self, step: int) -> None:
        """Waits until the newest step is copied too, due or not, or its tries have failed."""
        if step not in self.held() and step > self._last:
            self._push(step)
        self.wait()

    def wait(self) -> None:
        """Blocks until no copy is in progress."""
        while (thread := self._thread) is not None:
            thread.join()

    def close(self) -> None:
        """Waits for the copy in progress, without further tries."""
        self._is_closing = True
        self._no_retry.set()
        self.wait()

    def _push(self, step: int) -> None:
        with self._lock:
            replaced, self._next = self._next, step
            self._no_retry.set()  # a copy that waits for its next try is given up
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-copies", daemon=True)
                self._thread.start()
        if replaced is not None:
            self._report(CopyFailed(replaced, self.tier.location, f"replaced by checkpoint {step} before it began"))

    def _run(self) -> None:
        while True:
            with self._lock:
                step, self._next = self._next, None
                self._current = step
                if not self._is_closing:
                    self._no_retry.clear()
                if step is None:
                    self._thread = None
                    return
            self._copy(step)
            self._last = max(self._last, step)

    def _copy(self, step: int) -> None:
        begun, location = time.perf_counter(), self.tier.location
        try:
            size = retry(
                lambda: self.tier.put(step, self._store.path(step)),
                self._waits,
                self._no_retry,
                failure_reason,
                lambda reason, wait, number: self._report(Retrying(step, reason, wait, number, location)),
            )
        except RetryError as error:
            self._report(CopyFailed(step, location, f"{error.reason} ({error.tries} tries)"))
            return
        try:
            deleted = self._prune()
        except Exception as error:  # each store raises errors of its own classes
            self._report(CopyFailed(None, location, f"older ones cannot be deleted ({failure_reason(error)})"))
            deleted = []
        self._report(Copied(step, location, size, time.perf_counter() - begun, tuple(deleted)))

    def _prune(self) -> list[int]:
        self.tier.clean()
        infos = []
        for step in self.tier.steps():
            try:
                metrics = self.tier.content(step)["metrics"]
            except CheckpointError:
                metrics = None
            infos.append(StepInfo(step, self._store.path(step), metrics or {}))
        deleted = steps_beyond_limit(infos, self._retention)
        self.tier.delete(*deleted)
        return deleted
