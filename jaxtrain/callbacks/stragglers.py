"""Which process is slower than the others, found beside training. No JAX but to reach the other processes.

Steps end together: a process that waits in a collective is as slow as the one it waits for. So what names the culprit
is first of all the time that it waits for its own data; the step time differs where processes do not wait for one
another in each step.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Mapping
from statistics import median, median_low
from typing import Any, Protocol

import jax

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.distributed.kv_store import Coordinator
from jaxtrain.trackers.goodput import STEPS, GoodputLedger

EVERY = 10  # ticks between two words of a process
OUTLIER = 6.0  # robust standard deviations above the median
SHARE = 0.25  # of the median step that an outlier is above the median at least
IN_A_ROW = 3  # words
SILENCE = 60  # words after a warning in which the same process is not named again
MEASURES = {"data_wait": "waits for data", "step_time": "takes"}


class ReportStore(Protocol):
    """Where each process leaves its last word for the others."""

    def put(self, process: int, text: str) -> None: ...

    def all(self) -> Mapping[int, str]: ...


class StragglerMonitor:
    """Called every second by a thread of each process: says how fast this one is; process 0 compares.

    The loop takes warnings from `poll`, and waits for nothing.
    """

    def __init__(self, ledger: GoodputLedger, process: int, board: ReportStore):
        self._ledger, self._process, self._board = ledger, process, board
        self._ticks, self._since = 0, (0, dict.fromkeys(STEPS, 0.0))
        self._news: deque[str] = deque()
        self._last: dict[int, Any] = {}
        self._rows: dict[tuple[int, str], int] = {}  # words in a row that were out of line; below 0: silence

    def __call__(self) -> None:
        """One tick."""
        self._ticks += 1
        if self._ticks % EVERY:
            return
        self._say()
        if self._process == 0:
            self._compare()

    def poll(self) -> list[str]:
        """Warnings since the last call, oldest first."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def _say(self) -> None:
        """This process's means over the steps since its last word, if there were any."""
        seconds, step = self._ledger.seconds(), self._ledger.step
        before, spent = self._since
        steps = step - before
        if steps < 1:
            return
        new = {bucket: (seconds[bucket] - spent[bucket]) / steps for bucket in STEPS}
        word = {"step": step, "host": socket.gethostname(), "data_wait": new["data"], "step_time": sum(new.values())}
        self._since = step, {bucket: seconds[bucket] for bucket in STEPS}
        if before:  # the first word would hold what came before
            self._board.put(self._process, json.dumps(word))

    def _compare(self) -> None:
        """Names those who were out of line several times in a row."""
        words = {process: json.loads(text) for process, text in self._board.all().items()}
        fresh = {process: word for process, word in words.items() if word != self._last.get(process)}
        self._last = words
        if len(fresh) < 2:
            return
        step = median(word["step_time"] for word in fresh.values())
        for measure, does in MEASURES.items():
            values = {process: word[measure] for process, word in fresh.items()}
            slow = outliers(values, SHARE * step)
            for process in values:
                if self._counts(process, measure, process in slow):
                    who = f"process {process} on {fresh[process]['host']} {does}"
                    others = median_low(values.values())
                    text = f"straggler: {who} {values[process]:.3g} s a step, the median process {others:.3g} s"
                    self._news.append(text)

    def _counts(self, process: int, measure: str, is_slow: bool) -> bool:
        """Whether it is time to name it."""
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
    """Who is above the median by more than `OUTLIER` robust standard deviations (1.4826 MAD), and `least`.

    Of an even number the lower median is taken: of two processes the slower one can be told.
    """
    middle = median_low(values.values())
    spread = 1.4826 * median_low([abs(value - middle) for value in values.values()])
    return [who for who, value in values.items() if value - middle > max(OUTLIER * spread, least)]


class StragglerDetector(Callback):
    """Compares the processes of a run every few seconds, and logs a warning that names a slow one."""

    def __init__(self) -> None:
        self._pace: StragglerMonitor | None = None

    def on_train_begin(self, trainer: TrainerView, step: int) -> None:
        """Starts to compare, if there are several processes."""
        if jax.process_count() > 1:
            self._pace = StragglerMonitor(trainer.ledger, jax.process_index(), Coordinator())
            trainer.ticker.add(self._pace)

    def on_log(self, trainer: TrainerView, step: int) -> None:
        """Logs the warnings since the last logged step."""
        for text in self._pace.poll() if self._pace else ():
            trainer.trackers.event("warning", text=text)
