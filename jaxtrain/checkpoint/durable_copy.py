"""Copies committed steps to the durable tier in the background, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from jaxtrain.checkpoint.durable import Tier, content_at
from jaxtrain.checkpoint.events import Copied, CopyFailed, Event, Retrying
from jaxtrain.checkpoint.files import reason_of
from jaxtrain.checkpoint.store import CheckpointStore, StepInfo, surplus
from jaxtrain.errors import CheckpointError
from jaxtrain.io.retry import RetryError, retry

Kept = tuple[int, int, str | None]  # keep, keep_best, best: see `surplus`


class Copier:
    """Whatever fails is an event: a durable tier that is away costs copies and nothing else.

    Args:
      store: where the steps are copied from.
      every: steps between copies; None: each that is offered.
      kept: what stays in the tier.
      waits: seconds between tries.
      report: takes events, from the thread.
    """

    def __init__(
        self,
        store: CheckpointStore,
        tier: Tier,
        every: int | None,
        kept: Kept,
        waits: Sequence[float],
        report: Callable[[Event], None],
    ) -> None:
        self._store, self.tier, self._every, self._kept = store, tier, every, kept
        self._waits, self._report = tuple(waits), report
        self._lock, self._hurry = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._next: int | None = None
        self._now: int | None = None
        self._done = -1  # the newest step that was tried
        self._is_closing = False

    def offer(self, step: int, turn: int) -> None:
        """A step is committed, in place of step `turn` where that could not be: it is copied if that one's turn has
        come, in place of one that waits still."""
        if self._every is None or turn % self._every == 0:
            self._push(step)

    def held(self) -> set[int]:
        """Steps that must not be deleted yet."""
        with self._lock:
            return {step for step in (self._now, self._next) if step is not None}

    def finish(self, step: int) -> None:
        """Waits until the newest step is copied too, whatever its number, or its tries have failed."""
        if step not in self.held() and step > self._done:
            self._push(step)
        self.wait()

    def wait(self) -> None:
        """Blocks until nothing is being copied."""
        while (thread := self._thread) is not None:
            thread.join()

    def close(self) -> None:
        """The copy in flight may end, but is not tried again."""
        self._is_closing = True
        self._hurry.set()
        self.wait()

    def _push(self, step: int) -> None:
        with self._lock:
            late, self._next = self._next, step
            self._hurry.set()  # a copy that waits to be tried again gives way
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-copies", daemon=True)
                self._thread.start()
        if late is not None:
            self._report(CopyFailed(late, self.tier.place, f"checkpoint {step} came before its turn"))

    def _run(self) -> None:
        while True:
            with self._lock:
                step, self._next = self._next, None
                self._now = step
                if not self._is_closing:
                    self._hurry.clear()
                if step is None:
                    self._thread = None
                    return
            self._copy(step)
            self._done = max(self._done, step)

    def _copy(self, step: int) -> None:
        begun, place = time.perf_counter(), self.tier.place
        try:
            size = retry(
                lambda: self.tier.put(step, self._store.path(step)),
                self._waits,
                self._hurry,
                reason_of,
                lambda reason, wait, number: self._report(Retrying(step, reason, wait, number, place)),
            )
        except RetryError as error:
            self._report(CopyFailed(step, place, f"{error.reason} ({error.tries} tries)"))
            return
        try:
            deleted = self._prune()
        except Exception as error:  # each store has its own classes of them
            self._report(CopyFailed(None, place, f"older ones cannot be deleted ({reason_of(error)})"))
            deleted = []
        self._report(Copied(step, place, size, time.perf_counter() - begun, tuple(deleted)))

    def _prune(self) -> list[int]:
        self.tier.clean()
        found = []
        for step in self.tier.steps():
            try:
                metrics = content_at(self.tier, step)["metrics"]
            except CheckpointError:
                metrics = {}
            found.append(StepInfo(step, self._store.path(step), metrics or {}))
        gone = surplus(found, *self._kept)
        self.tier.delete(*gone)
        return gone
