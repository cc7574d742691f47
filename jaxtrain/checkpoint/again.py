"""When the processes of a run save again, together, after a save that failed. No JAX.

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

import time
from typing import Protocol

MARGIN = 4  # steps between the note and the save


class Board(Protocol):
    """Where the note is left: `Notes`."""

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
        """Whether all processes save after `done` steps. All ask after the same steps, in ascending order."""
        if self._at is not None and done > self._at:  # nothing was to be saved there: another step is chosen
            self._at, self._number = None, self._number + 1
        if self._at is None:
            self._at = self._choose(done) if self._is_first else self._chosen()
        return done == self._at

    def is_of(self, step: int) -> bool:
        """Whether a save of this step is this one, tried again."""
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
