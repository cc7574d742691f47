"""Requests of callbacks and signals between two steps: to save, validate, stop, go back, or call. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Request:
    """Request to act after a step.

    Attributes:
        kind: `save`, `evaluate`, `stop`, `rewind` to an earlier checkpoint, or `call` of `Callback.on_call`.
        reason: for the log; of a call: its name.
        steps: of a rewind: the least number of steps to go back.
        skip_batches: of a rewind: batches to skip from then on, counted from the checkpoint.
    """

    kind: Literal["save", "evaluate", "stop", "rewind", "call"]
    reason: str = ""
    steps: int = 0
    skip_batches: int = 0


class Requests:
    """Requests of a run of one process."""

    def __init__(self) -> None:
        self._pending: list[Request] = []

    def ask(self, request: Request) -> None:
        """Adds a request, from any thread or signal handler."""
        if request not in self._pending:
            self._pending.append(request)

    def due(self, step: int) -> list[Request]:
        """Returns the requests to carry out after `step`. All processes call it after the same steps, ascending."""
        requests, self._pending = self._pending, []
        return requests

    def report_failure(self, text: str) -> None:
        """Tells the other processes why this one ends; here there are none."""
