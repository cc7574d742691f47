"""Short lines on a silent terminal or log: what a run is doing, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from jaxtrain.trackers.goodput import GoodputLedger

SILENCE = 3.0  # seconds after which a line says what is going on
LONGEST_WAIT = 300.0  # seconds between such lines, which come ever more rarely
PERIOD = 0.5
DESCRIPTIONS = {  # of the buckets of the ledger; steps have progress lines of their own
    "compile": "compiling the train step",
    "restore": "reading a checkpoint",
    "eval": "validating",
    "checkpoint": "waiting for a checkpoint",
    "data": "waiting for data",
    "exchange": "waiting for other islands",
}


class Activity(NamedTuple):
    """Present activity of a run.

    Attributes:
        text: description, such as `compiling the train step`.
        seconds: time since it began.
        busy: time since the last step, or since the start.
    """

    text: str
    seconds: float
    busy: float


class ActivityClock:
    """Follows a ledger, and what is said besides while the run starts.

    Args:
        ledger: time accounting of the process; None: only what is said.
        clock: returns seconds.
    """

    def __init__(self, ledger: GoodputLedger | None, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self._text, self._said = "", clock()
        self._key: object = None
        self._since = self._busy = clock()

    def follows(self, ledger: GoodputLedger) -> bool:
        """Returns whether this is the ledger that it follows."""
        return self._ledger is ledger

    def say(self, text: str) -> None:
        """Describes what begins now, as long as the ledger's bucket is `init`; the empty text ends it."""
        self._text, self._said = text, self._clock()

    def now(self) -> Activity | None:
        """Returns the present activity; None in training steps, and where nothing is known."""
        bucket, changes, now = "init", 0, self._clock()
        if self._ledger is not None:
            bucket, _, changes = self._ledger.snapshot()
        text = self._text if bucket == "init" else DESCRIPTIONS.get(bucket, "")
        if (bucket, changes) != self._key:  # of which a thread knows when it looks, twice a second
            self._key, self._since = (bucket, changes), now
        if not text:
            self._busy = now
            return None
        since = self._said if bucket == "init" else self._since
        return Activity(text, now - since, now - self._busy)


class Reminder:
    """Thread that prints the activity when it lasts for seconds and nothing else was printed.

    Args:
        activity: returns the present one.
        silence: returns the seconds since something was printed.
        show: prints an activity.
    """

    def __init__(
        self, activity: Callable[[], Activity | None], silence: Callable[[], float], show: Callable[[Activity], None]
    ) -> None:
        self._activity, self._silence, self._show = activity, silence, show
        self._text, self._seconds, self._wait, self._ended = "", 0.0, SILENCE, threading.Event()
        self._thread = threading.Thread(target=self._run, name="activity", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and returns when it prints no more."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def look(self) -> None:
        """Prints the activity if it is due: after three seconds, then ever more rarely."""
        found = self._activity()
        if found is None or found.text != self._text or found.seconds < self._seconds:  # another one
            self._text, self._wait = found.text if found else "", SILENCE
        self._seconds = found.seconds if found else 0.0
        if found is not None and found.busy >= SILENCE and self._silence() >= self._wait:
            self._show(found)
            self._wait = min(max(found.seconds, 2 * SILENCE), LONGEST_WAIT)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            self.look()
