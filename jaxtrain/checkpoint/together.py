"""Saves of several processes: each writes its part, process 0 decides what became of the whole, all are told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil

import jax

from jaxtrain.checkpoint.again import Again
from jaxtrain.checkpoint.events import Event, Retrying
from jaxtrain.checkpoint.files import PART, CheckpointError, is_inside, write_durably
from jaxtrain.checkpoint.notes import Notes
from jaxtrain.checkpoint.processes import agreed
from jaxtrain.checkpoint.reasons import LATE, reason_of
from jaxtrain.checkpoint.saving import Save, Saver, nothing
from jaxtrain.checkpoint.store import Store

_POLL = 0.02  # seconds between looks for another process's file
_ORBAX = 300.0  # seconds that orbax waits for the others where it takes no timeout


@dataclass(frozen=True)
class Verdict:
    """What became of a save. `wait`: seconds until it is tried again, or None."""

    bytes: int = 0
    reason: str | None = None
    tries: int = 1
    wait: float | None = None


class JointSaver(Saver):
    """The `Saver` of each of several processes. One that failed is not repeated in its thread: see `Again`.

    Its thread ends when this process's part of the failed save is at an end, which orbax makes as late as `timeout`
    where another process failed (or 300 s, where it has no folder yet). So nobody still writes what is deleted, and no
    host copy is left when all try again.

    Args:
      timeout: seconds the processes wait for one another at a commit.
      notes: folder of this saver alone.
      (others): as of `Saver`.
    """

    def __init__(
        self,
        store: Store,
        timeout: float,
        notes: Notes,
        waits: Sequence[float],
        report: Callable[[Event], None],
        collect: Callable[[], list[int]],
        offer: Callable[[int, int], object],
    ) -> None:
        super().__init__(store, waits, report, collect, offer)
        self._timeout, self._all_notes = timeout, notes
        self._patience = max(timeout, _ORBAX) + timeout  # then any part is at an end
        self._index, self._others = jax.process_index(), range(1, jax.process_count())
        self._number = 0  # of saves, the same on every process
        self._notes = notes.within(0)
        self._again: Again | None = None  # the save that failed
        self._last: tuple[Sequence[jax.Array], Callable[[], bool]] | None = None

    def start(self, save: Save) -> None:
        """As `Saver.start`, on every process."""
        self._next_notes()
        super().start(save)

    def take_over(self, step: int) -> tuple[int, int]:
        """As `Saver.take_over`: it may be the try that `is_due` or `repeats` asked for."""
        if (again := self._again) is not None and again.is_of(step):
            self._again = None
            return again.tries + 1, again.turn
        self.drop()
        return 1, step

    def keep(self, arrays: Sequence[jax.Array], save: Callable[[], bool]) -> None:
        """`arrays`: what `save` saves."""
        self._last = arrays, save

    def is_due(self, done: int) -> bool:
        """Whether all processes save after `done` steps; every one asks."""
        self._last = None  # the state has gone on
        return self._again is not None and self._again.is_now(done)

    def repeats(self) -> bool:
        """Whether all processes begin their last save again, after its pause: it failed, and its state is there."""
        if self._last is None:
            return False
        (arrays, save), again = self._last, self._again
        is_gone = any(array.is_deleted() for array in arrays)
        pause = agreed(-1 if again is None or is_gone else ceil(1000 * again.pause()))
        if pause < 0:
            self.drop()
            return False
        time.sleep(pause / 1000)
        return save()

    def drop(self) -> None:
        """What was to be tried again is given up."""
        again, self._again = self._again, None
        if again is not None:
            self._give_up(again.step, again.reason, again.tries)

    def fail(self, save: Save, reason: str) -> None:
        """A save that could not begin: tried again, too. Every process calls it, with the same tries."""
        self._next_notes()
        verdict = self._failed(reason, save.tries)
        self._again = self._later(save, verdict)
        self._say(save.step, verdict)

    def _next_notes(self) -> None:
        if self._first:
            self._notes.clear()  # nobody reads what was of the save before
        self._number += 1
        self._notes = self._all_notes.within(self._number)

    def _run(self, save: Save) -> None:
        reason = None
        try:
            save.write()
            self._seal(save)
        except Exception as error:  # whatever orbax or the file system raises
            reason = reason_of(error)
        finally:
            save.write = nothing  # frees the host copy
        try:
            verdict = self._lead(save, reason) if self._first else self._follow(save, reason)
            if verdict.reason is not None:
                verdict = self._arrange(save, verdict)
        except Exception as error:  # the processes do not reach one another
            verdict = Verdict(reason=reason_of(error), tries=save.tries)
        save.tries = verdict.tries
        if verdict.reason is None:
            self._committed(save, verdict.bytes)
        else:
            self._say(save.step, verdict)

    def _seal(self, save: Save) -> None:
        super()._seal(save)
        if not self._first:
            write_durably(self._store.path(save.step) / PART.format(self._index), json.dumps(save.files))

    def _lead(self, save: Save, reason: str | None) -> Verdict:
        """Process 0: hears how the others fared, commits or tidies up, tells the verdict."""
        verdict = None
        reason = self._first_reason(reason)
        if reason is None:
            try:
                verdict = Verdict(self._commit(save), tries=save.tries)
            except Exception as error:
                reason = reason_of(error)
        if verdict is None:
            verdict = self._failed(self._tidied(save.step, reason or ""), save.tries)
        self._notes.put("verdict", json.dumps(asdict(verdict)))
        return verdict

    def _follow(self, save: Save, reason: str | None) -> Verdict:
        """The others: tell how they fared, and hear the verdict."""
        self._notes.put(f"part-{self._index}", reason or "")
        text = self._notes.wait("verdict", 2 * self._patience)
        late = f"process 0 did not commit it within {2 * self._patience:.0f} s"
        return Verdict(reason=late, tries=save.tries) if text is None else Verdict(**json.loads(text))

    def _first_reason(self, own: str | None) -> str | None:
        """Why it failed, or None: waits for all. A process that only waited for another one knows least."""
        deadline = time.monotonic() + self._patience
        reasons = [own]
        for index in self._others:
            told = self._notes.wait(f"part-{index}", deadline - time.monotonic())
            late = f"did not end its part within {self._patience:.0f} s"
            reasons.append(f"process {index} {late}" if told is None else told and f"process {index}: {told}")
        found = [reason for reason in reasons if reason]
        return next((reason for reason in found if LATE not in reason), found[0] if found else None)

    def _commit(self, save: Save) -> int:
        """Gathers the checksums, and commits."""
        parts = [self._store.path(save.step) / PART.format(index) for index in self._others]
        for part in parts:
            _await(part.exists, self._timeout, f"{part.name} cannot be seen by process 0")
            save.files |= {name: found for name, found in json.loads(part.read_text()).items() if is_inside(name)}
        size = super()._commit(save)
        for part in parts:
            part.unlink()
        return size

    def _failed(self, reason: str, tries: int) -> Verdict:
        return Verdict(reason=reason, tries=tries, wait=self._waits[tries - 1] if tries <= len(self._waits) else None)

    def _later(self, save: Save, verdict: Verdict) -> Again | None:
        if verdict.wait is None or verdict.reason is None:
            return None
        return Again(self._notes, self._first, save.step, save.turn, verdict.reason, verdict.tries, verdict.wait)

    def _arrange(self, save: Save, verdict: Verdict) -> Verdict:
        """All look for the step of the next try, before process 0 chooses it. Returns the verdict that holds then."""
        again = self._later(save, verdict)
        if again is None:
            return verdict
        if not self._first:
            self._again = again
            self._notes.put(f"heard-{self._index}")
            return verdict
        for index in self._others:
            if self._notes.wait(f"heard-{index}", self._timeout) is None:
                return replace(verdict, reason=f"{verdict.reason}, and process {index} does not answer", wait=None)
        self._again = again
        return verdict

    def _say(self, step: int, verdict: Verdict) -> None:
        reason, tries = verdict.reason or "", verdict.tries
        if verdict.wait is None:
            self._give_up(step, reason, tries)
        else:
            self._report(Retrying(step, reason, verdict.wait, f"{tries + 1} of {len(self._waits) + 1}"))


def _await(ready: Callable[[], bool], timeout: float, message: str) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            raise CheckpointError(f"{message} within {timeout:.0f} s")
        time.sleep(_POLL)
