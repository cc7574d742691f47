"""Where the wall time of a process goes: every second in exactly one bucket. No JAX."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

# Validation is none of the buckets of training: with it in `compute` a run that validates more would look better, and
# a step's time, to which the deadline of a hang is relative, would hold it.
BUCKETS = {
    "compute": "training steps",
    "data": "waiting for data",
    "compile": "compiling, with the first step",
    "init": "starting: imports, devices, data, parameters",
    "checkpoint": "training waits for a checkpoint",
    "restore": "reading a checkpoint",
    "eval": "validation, and writing a profile",
    "replay": "steps done again after a restart",
}
STEPS = ("compute", "replay", "data")  # what a step's time is made of
RECENT, ENOUGH = 101, 3  # steps whose times are kept, and how few tell nothing


class LedgerSnapshot(NamedTuple):
    """What goes on: the bucket, how many steps have begun, and a number that grows with every change."""

    bucket: str
    step: int
    changes: int


class GoodputLedger:
    """Counts the seconds of each bucket. There is one current bucket at any time, so that they add up to the life.

        ledger = GoodputLedger()                           # init
        ledger.begin("compile")                     # from here on
        with ledger.phase("data"): ...              # inside; afterwards what it was before
        ledger.begin("compute"); ledger.begin_step(step)    # a step that was done before goes to `replay`

    Phases are entered by one thread; any thread may look.

    Attributes:
        step: steps begun.
        reached: the largest step ever begun, by this process or one before.
    """

    def __init__(self, *, age: float = 0.0, clock: Callable[[], float] = time.monotonic):
        """
        Args:
            age: seconds that the process ran before, which go to `init`.
            clock: seconds.
        """
        self.step = self.furthest_step = 0
        self._clock, self._lock = clock, threading.Lock()
        self._begun = self._since = clock() - age
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._base, self._inner, self._is_replay, self._changes = "init", "", False, 0
        self._times: deque[float] = deque(maxlen=RECENT)
        self._at: float | None = None  # seconds of steps when the last one began

    @contextmanager
    def phase(self, bucket: str) -> Iterator[None]:
        """Time in here goes to `bucket`, but for phases inside."""
        outer = self._inner
        self._change(inner=_known(bucket))
        try:
            yield
        finally:
            self._change(inner=outer)

    def begin(self, bucket: str) -> None:
        """Time outside of phases goes to `bucket` from here on."""
        self._change(base=_known(bucket))

    def begin_step(self, step: int) -> None:
        """`step` steps have begun: time from here on is the last one's."""
        with self._lock:
            self._settle()
            self._changes += 1
            self.step, self._is_replay = step, step <= self.furthest_step
            self.furthest_step = max(self.furthest_step, step)
            if self._base == "compute":
                spent = sum(self._seconds[bucket] for bucket in STEPS)
                if self._at is not None:
                    self._times.append(spent - self._at)
                self._at = spent

    def seconds(self) -> dict[str, float]:
        """Seconds of every bucket up to now."""
        return self.state()[1]

    def state(self) -> tuple[float, dict[str, float]]:
        """(seconds of this process's life, seconds of every bucket), which add up to it."""
        with self._lock:
            return self._settle() - self._begun, dict(self._seconds)

    def snapshot(self) -> LedgerSnapshot:
        """What goes on now."""
        with self._lock:
            return LedgerSnapshot(self._bucket(), self.step, self._changes)

    def step_time(self) -> float | None:
        """Median seconds of the last steps; None before there are a few."""
        with self._lock:
            return median(self._times) if len(self._times) >= ENOUGH else None

    def _change(self, base: str | None = None, inner: str | None = None) -> None:
        with self._lock:
            self._settle()
            self._changes += 1
            self._base = self._base if base is None else base
            self._inner = self._inner if inner is None else inner

    def _bucket(self) -> str:
        return self._inner or ("replay" if self._base == "compute" and self._is_replay else self._base)

    def _settle(self) -> float:
        """Books the time since the last change; returns now."""
        now = self._clock()
        self._seconds[self._bucket()] += now - self._since
        self._since = now
        return now


class LedgerWriter:
    """Writes a ledger to the run's events, so seldom that it is little and so often that a kill loses little.

    Each record holds the whole life so far: `elapsed`, `seconds` of the buckets that are not 0, `phase`, `step` and
    `reached`. A killed process loses at most a fiftieth of its life, at least 1 s and at most 30 s.
    """

    SHARE, LEAST, MOST = 1 / 50, 1.0, 30.0

    def __init__(self, ledger: GoodputLedger, write: Callable[..., None]):
        """`write(kind, **fields)` takes an event."""
        self._ledger, self._write, self._due = ledger, write, 0.0

    def __call__(self) -> None:
        """Writes a record where one is due."""
        if self._ledger.state()[0] >= self._due:
            self.write()

    def write(self) -> None:
        """Writes a record."""
        (elapsed, seconds), snapshot = self._ledger.state(), self._ledger.snapshot()
        known = {bucket: round(value, 3) for bucket, value in seconds.items() if value}
        self._write(
            "ledger", step=snapshot.step, phase=snapshot.bucket, reached=self._ledger.furthest_step,
            elapsed=round(elapsed, 3), seconds=known,
        )  # fmt: skip
        self._due = elapsed + min(max(elapsed * self.SHARE, self.LEAST), self.MOST)


def process_age() -> float:
    """Seconds since this process was started, 0 where the system does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begun = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), since boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def _known(bucket: str) -> str:
    if bucket not in BUCKETS:
        raise ValueError(f"no bucket `{bucket}`; there are {', '.join(BUCKETS)}")
    return bucket
