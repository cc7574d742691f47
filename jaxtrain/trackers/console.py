"""Console output of a run: a progress line, and other lines printed above it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from jaxtrain.io.terminal import plain_console
from jaxtrain.trackers.activity import SILENCE, Activity, ActivityClock, Reminder
from jaxtrain.trackers.goodput import GoodputLedger

PLAIN_EVERY = 10.0  # seconds between progress lines if they cannot be redrawn
SHORTEST_BAR, LONGEST_BAR = 4, 40
MOST_OWN_METRICS = 3  # of a user, on the line
RATES = {f"{unit}_per_sec{per}" for unit in ("tokens", "samples") for per in ("", "_per_device")}
TRAINER_METRICS = RATES | {
    "step", "loss", "lr", "grad_norm", "skipped", "spike", "loss_scale", "tokens", "samples", "step_time", "data_wait",
    "mfu", "hfu", "memory", "bubble", "skipped_replicas", "consensus_distance", "exchanged_bytes",
    "received_bytes",
}  # fmt: skip
SMOOTHING = 0.9  # exponential moving average of the step time, for the ETA


@dataclass
class Status:
    """Content of the progress line."""

    total: int
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    step_time: float | None = None  # seconds, smoothed
    activity: Callable[[], Activity | None] = lambda: None  # what is going on besides steps

    @property
    def eta(self) -> float | None:
        """Seconds left."""
        return None if self.step_time is None else (self.total - self.step) * self.step_time


class ConsoleTracker:
    """Tracker that shows progress: a bar with ETA, loss, lr, grad norm, tokens/s, MFU and data wait.

    On a terminal it redraws one line in place, which does not wrap from 60 columns on. Elsewhere (a log file, CI) it
    prints a plain line every ten seconds and at the end. Other output appears above the line. From `watch` to `close`
    it says, too, what lasts for more than three seconds and is no step, such as compiling.
    """

    def __init__(
        self,
        steps: int,
        *,
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Creates the console tracker.

        Args:
            steps: total steps of the run.
            console: output; default: stdout.
            live: whether to redraw the line; default: if the console is a terminal.
            clock: returns seconds, for the plain lines.
        """
        # In a notebook rich would show each line as an output of its own.
        self.console = console or plain_console(soft_wrap=False, force_jupyter=False)
        isatty = getattr(self.console.file, "isatty", lambda: False)()
        self._is_live = isatty and not self.console.is_dumb_terminal if live is None else live
        self._clock, self._shown, self._live = clock, -math.inf, None
        self._printed, self._activity, self._reminder = clock(), ActivityClock(None, clock), None
        self.status = Status(steps, activity=self._now)

    def watch(self, ledger: GoodputLedger) -> None:
        """Begins to say what is going on, by the buckets of a ledger and by `say`; in the first process of a run."""
        if os.environ.get("JAX_PROCESS_ID", "0") != "0":  # JAX may not have started
            return
        if not self._activity.follows(ledger):
            self._activity = ActivityClock(ledger, self._clock)
        self._begin()

    def say(self, text: str) -> None:
        """Describes what the start of a run does now, in case that it lasts."""
        self._activity.say(text)

    @contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """Says what goes on inside, if it lasts, outside of the time from `watch` to `close`."""
        self._activity = ActivityClock(None, self._clock)
        self.say(text)
        self._begin()
        try:
            yield
        finally:
            self.close()

    def _now(self) -> Activity | None:
        return self._activity.now()

    def _begin(self) -> None:
        """Starts the line on a terminal, elsewhere the reminder."""
        if self._is_live and self._live is None:
            line = _Line(self.status)
            self._live = Live(line, console=self.console, refresh_per_second=4, vertical_overflow="crop")
            self._live.start()
        elif not self._is_live and self._reminder is None:
            self._reminder = Reminder(self._now, lambda: self._clock() - self._printed, self._show_activity)
            self._reminder.start()

    def _show_activity(self, activity: Activity) -> None:
        self.print(f"{activity.text}: {activity.seconds:.0f} s so far")

    def start(self, info: Mapping[str, Any]) -> None:
        self.status.step = int(info.get("step", 0))
        if self.status.step:
            self.print(f"resuming after step {self.status.step:,} of {self.status.total:,}")
        if self._is_live:
            self._begin()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "loss" not in values:
            return
        status = self.status
        status.step, status.values = step, dict(values)
        took = values.get("step_time")
        if took is not None:
            old = took if status.step_time is None else status.step_time
            status.step_time = SMOOTHING * old + (1 - SMOOTHING) * took
        now = self._clock()
        if not self._is_live and (now - self._shown >= PLAIN_EVERY or step >= status.total):
            self._shown = now
            self.print(plain_line(status))

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "compiled":
            self.print(f"compiled  in {fields['seconds']:.1f} s, with the first step")
        else:
            self.print(event_line(kind, fields))

    def artifact(self, path: Path) -> None:
        self.print(f"wrote {path}")

    def rewind(self, step: int) -> None:
        self.status.step = step

    def close(self) -> None:
        if self._reminder is not None:
            self._reminder.stop()
            self._reminder = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def print(self, *items: RenderableType) -> None:
        """Prints above the progress line; does not wrap plain text, so that paths and commands can be copied."""
        self._printed = self._clock()
        for item in items:
            self.console.print(item, soft_wrap=isinstance(item, (str, Text)), markup=False)


class _Line:
    """Draws the status in the current width of the console."""

    def __init__(self, status: Status):
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        # One column less than the width: some terminals wrap a full line.
        yield from live_line(self._status, options.max_width - 1).__rich_console__(console, options)


def live_line(status: Status, width: int) -> Text:
    """Formats the status in one line of at most `width` columns; drops the least important cells first."""
    done = min(1.0, status.step / max(status.total, 1))
    cells = _cells(status)
    ranks = sorted(rank for rank, _ in cells)
    variants = [(f"{status.step:,}/{status.total:,}", len(cells))]
    variants += [(f"{100 * done:.0f}%", limit) for limit in range(len(cells), 0, -1)]
    for steps, limit in variants:
        tail = " ".join([steps, *(text for rank, text in cells if rank in ranks[:limit])])
        if len(tail) + 1 + SHORTEST_BAR <= width:
            return _bar(done, min(LONGEST_BAR, width - len(tail) - 1)).append(f" {tail}", style="default")
    return Text(f"{100 * done:.0f}%"[:width])


def _throughput(values: Mapping[str, Any]) -> str:
    unit = "samples" if "samples" in values else "tokens"
    return f"{count(values.get(f'{unit}_per_sec'))} {'tok' if unit == 'tokens' else unit}/s"


def _cells(status: Status) -> list[tuple[int, str]]:
    """Returns (rank, text) in the order shown; cells of a higher rank are dropped first."""
    values, activity = status.values, status.activity()
    doing = f"{activity.text} {duration(activity.seconds)}" if activity is not None else ""
    if not values:
        return [(0, doing or "waiting for the first step")]
    return [
        *([(1, doing)] if activity is not None and activity.seconds >= SILENCE else []),
        (1, "eta " + duration(status.eta)),
        (0, f"loss {number(values.get('loss'))}"),
        (4, f"lr {small(values.get('lr'))}"),
        (5, f"|g| {short(values.get('grad_norm'))}"),
        (2, _throughput(values)),
        *((3, f"mfu {percent(value)}") for value in _present(values, "mfu")),
        (6, f"wait {percent(_wait(values))}"),
        *((7, f"bubble {percent(value)}") for value in _present(values, "bubble")),
        *((8, f"spread {short(value)}") for value in _present(values, "consensus_distance")),
        *((9, f"sent {count(value)}B") for value in _present(values, "exchanged_bytes")),
        *((10, f"{name} {number(value)}") for name, value in own_metrics(values).items()),
    ]


def own_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first metrics of a user's loss, model or callbacks: what no part of the trainer adds."""
    known = ("eval/", "lr/", "left_out/")
    own = {
        name: value for name, value in values.items()
        if name not in TRAINER_METRICS and not name.startswith(known) and value != values.get("loss")
    }  # fmt: skip
    return dict(list(own.items())[:MOST_OWN_METRICS])


def _present(values: Mapping[str, Any], name: str) -> list[Any]:
    return [values[name]] if name in values else []


def _wait(values: Mapping[str, Any]) -> float | None:
    """Returns the share of the step time spent waiting for data."""
    wait, step = values.get("data_wait"), values.get("step_time")
    return None if wait is None or not step else wait / step


def _bar(done: float, width: int) -> Text:
    filled = round(done * width)
    return Text("━" * filled, style="green").append("─" * (width - filled), style="bright_black")


def plain_line(status: Status) -> str:
    """Formats the status for a log file."""
    cells = "  ".join(text for _, text in _cells(status))
    return f"step {status.step:,}/{status.total:,}  {cells}"


def event_line(kind: str, fields: Mapping[str, Any]) -> str:
    """Formats an event in one line: step, kind, then the other fields."""
    step = f"step {fields['step']:,}  " if isinstance(fields.get("step"), int) else ""
    rest = "  ".join(f"{key} {_value(value)}" for key, value in fields.items() if key != "step" and value is not None)
    return f"{step}{kind}  {rest}".rstrip()


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def duration(seconds: float | None) -> str:
    """Formats seconds as m:ss, h:mm:ss or days."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    left = max(0, round(seconds))
    minutes, secs = divmod(left, 60)
    hours, mins = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours / 24:.0f}d"
    return f"{hours}:{mins:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def number(value: float | None) -> str:
    """Formats with four decimals below ten (a loss), fewer above."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.4f}" if size < 10 else f"{value:.2f}" if size < 10_000 else f"{value:.3g}"


def short(value: float | None) -> str:
    """Formats with two decimals from 0.01 to 100, else with two digits and an exponent."""
    return f"{value:.2f}" if value is not None and (0.01 <= abs(value) < 100 or value == 0) else small(value)


def small(value: float | None) -> str:
    """Formats with two digits and a short exponent: 3.0e-4."""
    return "-" if value is None else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def count(value: float | None) -> str:
    """Formats with a unit: 45.1k, 1.23M."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}" if abs(value) < 999.5 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def percent(share: float | None) -> str:
    """Formats a share (0 to 1) in percent, with one decimal below ten."""
    if share is None or not math.isfinite(share):
        return "-"
    return f"{100 * share:.0f}%" if share >= 0.0995 or share == 0 else f"{100 * share:.1f}%"
