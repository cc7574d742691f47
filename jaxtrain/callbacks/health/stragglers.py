"""Detection of processes that are slower than the others, beside training.

Steps end together: a process that waits in a collective is as slow as the one that it waits for. So the time that a
process waits for its own data is the main sign. Step times differ only if processes do not wait for each other in each
step.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Mapping
from statistics import median, median_low
from typing import Any

import jax

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.distributed.kv_store import KeyValueStore
from jaxtrain.trackers.goodput import STEPS, GoodputLedger

EVERY = 10  # ticks between two reports of a process
OUTLIER = 6.0  # robust standard deviations above the median
SHARE = 0.25  # of the median step time; least distance of an outlier from the median
IN_A_ROW = 3  # reports as an outlier until a warning
SILENCE = 60  # reports after a warning without another one for the same process
MEASURES = {"data_wait": "waits for data", "step_time": "takes"}


class StragglerMonitor:
    """Publishes the speed of this process; process 0 compares all. A thread of each process calls it every second.

    The training loop takes warnings from `poll` and never waits.
    """

    def __init__(self, ledger: GoodputLedger, process: int, store: KeyValueStore):
        self._ledger, self._process, self._store = ledger, process, store
        self._ticks, self._since = 0, (0, dict.fromkeys(STEPS, 0.0))
        self._warnings: deque[str] = deque()
        self._last: dict[int, Any] = {}
        self._rows: dict[tuple[int, str], int] = {}  # reports in a row as an outlier; below 0: silence

    def __call__(self) -> None:
        """Runs one tick."""
        self._ticks += 1
        if self._ticks % EVERY:
            return
        self._publish()
        if self._process == 0:
            self._compare()

    def poll(self) -> list[str]:
        """Returns the warnings since the last call, oldest first."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def _publish(self) -> None:
        """Publishes the means of this process over the steps since its last report, if any."""
        seconds, step = self._ledger.seconds(), self._ledger.step
        before, spent = self._since
        steps = step - before
        if steps < 1:
            return
        new = {bucket: (seconds[bucket] - spent[bucket]) / steps for bucket in STEPS}
        report = {"step": step, "host": socket.gethostname(), "data_wait": new["data"], "step_time": sum(new.values())}
        self._since = step, {bucket: seconds[bucket] for bucket in STEPS}
        if before:  # the first report would include the time before training
            self._store.put(str(self._process), json.dumps(report), overwrite=True)

    def _compare(self) -> None:
        """Adds warnings for processes that were outliers several times in a row."""
        reports = {int(process): json.loads(text) for process, text in self._store.entries().items()}
        fresh = {process: report for process, report in reports.items() if report != self._last.get(process)}
        self._last = reports
        if len(fresh) < 2:
            return
        step = median(report["step_time"] for report in fresh.values())
        for measure, verb in MEASURES.items():
            values = {process: report[measure] for process, report in fresh.items()}
            slow = outliers(values, SHARE * step)
            for process in values:
                if self._should_warn(process, measure, process in slow):
                    who = f"process {process} on {fresh[process]['host']} {verb}"
                    others = median_low(values.values())
                    text = f"straggler: {who} {values[process]:.3g} s a step, the median process {others:.3g} s"
                    self._warnings.append(text)

    def _should_warn(self, process: int, measure: str, is_slow: bool) -> bool:
        """Counts a report; returns whether it is time for a warning."""
        key = process, measure
        row = self._rows.get(key, 0)
        if row < 0:
            self._rows[key] = row + 1
            return False
        self._rows[key] = row + 1 if is_slow else 0
        if self._rows[key] < IN_A_ROW:
            return False
        self._rows[key] = -SILENCE
        return True


def outliers(values: Mapping[int, float], least: float) -> list[int]:
    """Returns the keys of values above the median by more than `OUTLIER` robust deviations (1.4826 MAD) and `least`.

    Uses the lower median, so that the slower one of two processes is an outlier.
    """
    middle = median_low(values.values())
    spread = 1.4826 * median_low([abs(value - middle) for value in values.values()])
    return [key for key, value in values.items() if value - middle > max(OUTLIER * spread, least)]


class StragglerDetector(Callback):
    """Compares the processes of a run every few seconds, and logs a warning that names a slow one."""

    def __init__(self) -> None:
        self._monitor: StragglerMonitor | None = None

    def on_train_begin(self, trainer: TrainerView, step: int) -> None:
        """Starts the monitor if there are several processes."""
        if jax.process_count() > 1:
            store = KeyValueStore("jaxtrain/stragglers")
            self._monitor = StragglerMonitor(trainer.ledger, jax.process_index(), store)
            trainer.ticker.add(self._monitor)

    def on_log(self, trainer: TrainerView, step: int) -> None:
        """Logs the warnings since the last logged step."""
        for text in self._monitor.poll() if self._monitor else ():
            trainer.trackers.event("warning", text=text)
