"""Retries of a failed save, in which all processes of a run take part at the same step.

Orbax must be called by all processes on their main threads, in one order, so that all must begin at one and the same
step, without a collective in the steps before it. Process 0 chooses the step when the pause is over and leaves a note;
the others look for it after each step, but only while a save of theirs has failed. MARGIN is what makes them see it
in time. The loop reads the metrics of a step, which take all processes, before it asks after the next one: who asks
after step n knows that process 0 has begun step n - 1, so it has asked after step n - 2. A note that process 0 leaves
while it asks after step c is therefore seen by all who ask after step c + 2. Two more steps are there for a look that
the network loses.

To count tries and pauses in each process instead, or to save again after a fixed number of steps, would be simpler, but
a process that wrote its part cannot know by itself that another one failed, nor when that was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Protocol

import jax

from jaxtrain.checkpoint.events import Event, Retrying
from jaxtrain.checkpoint.files import LATE, PART, is_inside, reason_of
from jaxtrain.checkpoint.saving import Save, Saver, nothing
from jaxtrain.checkpoint.store import CheckpointStore
from jaxtrain.distributed.agreement import agreed
from jaxtrain.distributed.kv_store import Notes
from jaxtrain.errors import CheckpointError
from jaxtrain.io.atomic import write_atomic

MARGIN = 4  # steps between the note and the save


class Board(Protocol):
    """Key-value store of the retry: `Notes`."""

    def put(self, name: str, text: str = "") -> None: ...

    def look(self, name: str) -> str | None: ...


class Again:
    """A save that failed and is to be tried again. Every process has one; main thread only.

    Args:
      step: that could not be saved.
      turn: step that the first try was of.
      tries: how often it was tried.
      wait: seconds until the next try at the earliest, by the clock of process 0.
    """

    def __init__(
        self, board: Board, is_first: bool, step: int, turn: int, reason: str, tries: int, wait: float
    ) -> None:
        self._board, self._is_first = board, is_first
        self.step, self.turn, self.reason, self.tries = step, turn, reason, tries
        self._due = time.monotonic() + wait
        self._at: int | None = None
        self._number = 0  # of the note

    def is_now(self, done: int) -> bool:
        """Returns whether all processes save after `done` steps. All ask after the same steps, in ascending order."""
        if self._at is not None and done > self._at:  # nothing was to be saved there: another step is chosen
            self._at, self._number = None, self._number + 1
        if self._at is None:
            self._at = self._choose(done) if self._is_first else self._chosen()
        return done == self._at

    def is_of(self, step: int) -> bool:
        """Returns whether a save of this step is this one, tried again."""
        return step in (self.step, self._at)

    def pause(self) -> float:
        """Seconds until it may be tried again."""
        return max(0.0, self._due - time.monotonic())

    def _choose(self, done: int) -> int | None:
        if self.pause():
            return None
        self._board.put(f"at-{self._number}", str(done + MARGIN))
        return done + MARGIN

    def _chosen(self) -> int | None:
        text = self._board.look(f"at-{self._number}")
        return None if text is None else int(text)


_POLL = 0.02  # seconds between looks for another process's file
_ORBAX = 300.0  # seconds that orbax waits for the others where it takes no timeout


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a save. `wait`: seconds until it is tried again, or None."""

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
        store: CheckpointStore,
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
        """Starts a save like `Saver.start`, on every process."""
        self._next_notes()
        super().start(save)

    def take_over(self, step: int) -> tuple[int, int]:
        """Takes over like `Saver.take_over`: it may be the try that `is_due` or `repeats` asked for."""
        if (again := self._again) is not None and again.is_of(step):
            self._again = None
            return again.tries + 1, again.turn
        self.drop()
        return 1, step

    def keep(self, arrays: Sequence[jax.Array], save: Callable[[], bool]) -> None:
        """`arrays`: what `save` saves."""
        self._last = arrays, save

    def is_due(self, done: int) -> bool:
        """Returns whether all processes save after `done` steps; every one asks."""
        self._last = None  # the state has gone on
        return self._again is not None and self._again.is_now(done)

    def repeats(self) -> bool:
        """Returns whether all processes begin their last save again, after its pause: it failed, and its state is
        there.
        """
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
        """Gives up the retry."""
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
            verdict = SaveOutcome(reason=reason_of(error), tries=save.tries)
        save.tries = verdict.tries
        if verdict.reason is None:
            self._committed(save, verdict.bytes)
        else:
            self._say(save.step, verdict)

    def _seal(self, save: Save) -> None:
        super()._seal(save)
        if not self._first:
            write_atomic(self._store.path(save.step) / PART.format(self._index), json.dumps(save.files))

    def _lead(self, save: Save, reason: str | None) -> SaveOutcome:
        """Process 0: hears how the others fared, commits or tidies up, tells the verdict."""
        verdict = None
        reason = self._first_reason(reason)
        if reason is None:
            try:
                verdict = SaveOutcome(self._commit(save), tries=save.tries)
            except Exception as error:
                reason = reason_of(error)
        if verdict is None:
            verdict = self._failed(self._tidied(save.step, reason or ""), save.tries)
        self._notes.put("verdict", json.dumps(asdict(verdict)))
        return verdict

    def _follow(self, save: Save, reason: str | None) -> SaveOutcome:
        """The others: tell how they fared, and hear the verdict."""
        self._notes.put(f"part-{self._index}", reason or "")
        text = self._notes.wait("verdict", 2 * self._patience)
        late = f"process 0 did not commit it within {2 * self._patience:.0f} s"
        return SaveOutcome(reason=late, tries=save.tries) if text is None else SaveOutcome(**json.loads(text))

    def _first_reason(self, own: str | None) -> str | None:
        """Returns the reason of the failure, or None; waits for all. A process that only waited for another one knows
        least.
        """
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

    def _failed(self, reason: str, tries: int) -> SaveOutcome:
        return SaveOutcome(
            reason=reason, tries=tries, wait=self._waits[tries - 1] if tries <= len(self._waits) else None
        )

    def _later(self, save: Save, verdict: SaveOutcome) -> Again | None:
        if verdict.wait is None or verdict.reason is None:
            return None
        return Again(self._notes, self._first, save.step, save.turn, verdict.reason, verdict.tries, verdict.wait)

    def _arrange(self, save: Save, verdict: SaveOutcome) -> SaveOutcome:
        """Agrees on the step of the next try, which process 0 chooses. Returns the verdict that holds then."""
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

    def _say(self, step: int, verdict: SaveOutcome) -> None:
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
