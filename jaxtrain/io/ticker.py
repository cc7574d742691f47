"""Functions that are called once a second, beside whatever the main thread does or waits for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

PERIOD = 1.0  # seconds


class Ticker:
    """Calls each of its functions every `period` seconds in a daemon thread of its own, until `close`.

    So one that waits for a disk or a network holds up no other. One that raises is not called again, which is said in
    one line on stderr. Time in which the process was stopped is one tick, however long.
    """

    def __init__(self, *calls: Callable[[], None], period: float = PERIOD):
        self._period, self._closed, self._threads = period, threading.Event(), []
        for call in calls:
            self.add(call)

    def add(self, call: Callable[[], None]) -> None:
        """Adds a function, called from the next tick on."""
        name = f"tick-{type(call).__name__.lower()}"
        thread = threading.Thread(target=self._run, args=(call,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Ends the threads after the calls in progress, for which it waits some seconds. May be called twice."""
        self._closed.set()
        for thread in self._threads:
            thread.join(5.0)

    def _run(self, call: Callable[[], None]) -> None:
        while not self._closed.wait(self._period):
            try:
                call()
            except Exception as error:  # whatever it watches or writes: training goes on
                said = " ".join(str(error).split()) or type(error).__name__
                print(f"jaxtrain: {type(call).__name__} ends, training goes on: {said[:200]}", file=sys.stderr)
                return
