"""Functions that background threads call once a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

PERIOD = 1.0  # seconds


class Ticker:
    """Calls each of its functions every `period` seconds in a separate daemon thread, until `close`.

    A function that waits for a disk or a network does not delay the others. One that raises is not called again and
    is reported in one line on stderr. Time in which the process was suspended counts as one tick.
    """

    def __init__(self, *calls: Callable[[], None], period: float = PERIOD):
        self._period, self._closed, self._threads = period, threading.Event(), []
        for call in calls:
            self.add(call)

    def add(self, call: Callable[[], None]) -> None:
        """Adds a function; its first call is one period later."""
        name = f"tick-{type(call).__name__.lower()}"
        thread = threading.Thread(target=self._run, args=(call,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Stops the threads, waiting up to 5 seconds for calls in progress. May be called twice."""
        self._closed.set()
        for thread in self._threads:
            thread.join(5.0)

    def _run(self, call: Callable[[], None]) -> None:
        while not self._closed.wait(self._period):
            try:
                call()
            except Exception as error:  # a broken monitor must not stop training
                reason = " ".join(str(error).split()) or type(error).__name__
                print(f"jaxtrain: {type(call).__name__} stopped, training continues: {reason[:200]}", file=sys.stderr)
                return
