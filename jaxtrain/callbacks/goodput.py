"""Writes the time ledger to the events of a run."""

from __future__ import annotations

from collections.abc import Callable

from jaxtrain.trackers.goodput import Ledger


class Records:
    """Writes a ledger to the run's events, so seldom that it is little and so often that a kill loses little.

    Each record holds the whole life so far: `elapsed`, `seconds` of the buckets that are not 0, `phase`, `step` and
    `reached`. A killed process loses at most a fiftieth of its life, at least 1 s and at most 30 s.
    """

    SHARE, LEAST, MOST = 1 / 50, 1.0, 30.0

    def __init__(self, ledger: Ledger, write: Callable[..., None]):
        """`write(kind, **fields)` takes an event."""
        self._ledger, self._write, self._due = ledger, write, 0.0

    def __call__(self) -> None:
        """Writes a record where one is due."""
        if self._ledger.state()[0] >= self._due:
            self.write()

    def write(self) -> None:
        """Writes a record."""
        (elapsed, seconds), look = self._ledger.state(), self._ledger.look()
        known = {bucket: round(value, 3) for bucket, value in seconds.items() if value}
        self._write(
            "ledger", step=look.step, phase=look.bucket, reached=self._ledger.reached, elapsed=round(elapsed, 3),
            seconds=known,
        )  # fmt: skip
        self._due = elapsed + min(max(elapsed * self.SHARE, self.LEAST), self.MOST)
