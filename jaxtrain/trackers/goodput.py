"""Time accounting of a process: every second of wall time belongs to exactly one bucket."""

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

from jaxtrain.io.system import boot_id, boot_time

# Validation has a bucket of its own: in `compute`, a run that validates more would look better, and validation would
# count in the step time, from which the watchdog derives its deadline.
BUCKETS = {
    "compute": "training steps",
    "data": "waiting for data",
    "compile": "compiling, with the first step",
    "init": "starting: imports, devices, data, parameters",
    "checkpoint": "training waits for a checkpoint",
    "restore": "reading a checkpoint",
    "exchange": "waiting for other islands, and for values on their way",
    "eval": "validation, and writing a profile",
    "replay": "steps done again after a restart",
}
STEPS = ("compute", "replay", "data")  # buckets of the step time
RECENT, ENOUGH = 101, 3  # step times that are kept, and the least number for a median


class LedgerSnapshot(NamedTuple):
    """State of a ledger: the current bucket, the number of steps begun, and a counter of changes."""

    bucket: str
    step: int
    changes: int


class GoodputLedger:
    """Counts the seconds of each bucket. Exactly one bucket is current at any time.

        ledger = GoodputLedger()                           # init
        ledger.begin("compile")                     # from now on
        with ledger.phase("data"): ...              # inside; the previous bucket afterwards
        ledger.begin("compute"); ledger.begin_step(step)    # a repeated step counts as `replay`

    One thread changes the phase; any thread may read.

    Attributes:
        step: number of steps begun.
        reached: the largest step ever begun, by this process or one before.
    """

    def __init__(self, *, age: float = 0.0, clock: Callable[[], float] = time.monotonic):
        """Creates the goodput ledger.

        Args:
            age: seconds that the process ran before; they count as `init`.
            clock: returns seconds.
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
        """Counts the time inside as `bucket`, except for inner phases."""
        outer = self._inner
        self._change(inner=bucket)
        try:
            yield
        finally:
            self._change(inner=outer)

    def begin(self, bucket: str) -> None:
        """Counts the time outside of phases as `bucket` from now on."""
        self._change(base=bucket)

    def begin_step(self, step: int) -> None:
        """Notes that `step` steps have begun; the time from now on belongs to the last one."""
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
        """Returns the seconds of every bucket up to now."""
        return self.totals()[1]

    def totals(self) -> tuple[float, dict[str, float]]:
        """Returns (seconds of this process, seconds of every bucket); the buckets sum to the first."""
        with self._lock:
            return self._settle() - self._begun, dict(self._seconds)

    def snapshot(self) -> LedgerSnapshot:
        """Returns the current state."""
        with self._lock:
            return LedgerSnapshot(self._bucket(), self.step, self._changes)

    def step_time(self) -> float | None:
        """Returns the median seconds of the last steps; None after too few."""
        with self._lock:
            return median(self._times) if len(self._times) >= ENOUGH else None

    def _change(self, base: str | None = None, inner: str | None = None) -> None:
        if (base or inner or "init") not in BUCKETS:
            raise ValueError(f"no bucket `{base or inner}`; expected one of {', '.join(BUCKETS)}")
        with self._lock:
            self._settle()
            self._changes += 1
            self._base = self._base if base is None else base
            self._inner = self._inner if inner is None else inner

    def _bucket(self) -> str:
        return self._inner or ("replay" if self._base == "compute" and self._is_replay else self._base)

    def _settle(self) -> float:
        """Adds the time since the last change to its bucket; returns now."""
        now = self._clock()
        self._seconds[self._bucket()] += now - self._since
        self._since = now
        return now


class LedgerWriter:
    """Writes a ledger to the run's events from time to time.

    Each record covers the process so far: `elapsed`, `seconds` of the buckets that are not 0, `phase`, `step` and
    `reached`. `boot` and `uptime` say when it was by a clock that nobody sets. A killed process loses a fiftieth of its
    time at most, but 1 s to 30 s.
    """

    SHARE, LEAST, MOST = 1 / 50, 1.0, 30.0

    def __init__(self, ledger: GoodputLedger, write: Callable[..., None]):
        """`write(kind, **fields)` writes an event."""
        self._ledger, self._write, self._due, self._boot = ledger, write, 0.0, boot_id()

    def __call__(self) -> None:
        """Writes a record if it is due."""
        if self._ledger.totals()[0] >= self._due:
            self.write()

    def write(self) -> None:
        """Writes a record."""
        (elapsed, seconds), snapshot = self._ledger.totals(), self._ledger.snapshot()
        nonzero = {bucket: round(value, 3) for bucket, value in seconds.items() if value}
        self._write(
            "ledger", step=snapshot.step, phase=snapshot.bucket, reached=self._ledger.furthest_step,
            elapsed=round(elapsed, 3), seconds=nonzero, boot=self._boot, uptime=round(boot_time(), 3),
        )  # fmt: skip
        self._due = elapsed + min(max(elapsed * self.SHARE, self.LEAST), self.MOST)


def process_age() -> float:
    """Returns the seconds since this process started; 0 if unknown."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begun = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), since boot
        return max(0.0, boot_time() - begun)
    except (OSError, IndexError, ValueError):
        return 0.0
