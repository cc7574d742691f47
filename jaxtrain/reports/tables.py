"""What reports on a run have in common: figures and rows of tables, as text. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from jaxtrain.errors import clean
from jaxtrain.reports.history import ALL, Attempt, RunHistory, format_seconds
from jaxtrain.trackers.console import count, event_line, number, percent

MOST = 20  # rows of a table: the newest


class KeyFigure(NamedTuple):
    """A figure of the headline."""

    name: str
    value: str
    note: str


def facts(run: RunHistory) -> list[KeyFigure]:
    """What one wants to know first."""
    best = [pair for pair in run.series("eval/loss") if pair[1] == pair[1]]
    low = min(best, key=lambda pair: pair[1], default=None)
    steps = f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    restarts = max(0, len(run.lives) - 1)
    found = [
        KeyFigure("goodput", percent(run.goodput), f"training steps in {format_seconds(run.elapsed)} of wall time"),
        KeyFigure("steps", steps, f"{restarts} restart{'' if restarts == 1 else 's'}"),
        KeyFigure("loss", number(run.last("loss")), f"first {number(_first(run, 'loss'))}"),
    ]
    if low is not None:
        note = f"lowest {number(low[1])} at step {low[0]:,}"
        found.append(KeyFigure("validation loss", number(run.last("eval/loss")), note))
    if (rate := run.median("tokens_per_sec")) is not None:
        note = f"median of the steps; {count(run.throughput())} over the whole time"
        found.append(KeyFigure("throughput", f"{count(rate)} tok/s", note))
    if (took := run.median("step_time")) is not None:
        note = f"median; of it {1e3 * (run.median('data_wait') or 0.0):,.1f} ms waiting for data"
        found.append(KeyFigure("step time", f"{1e3 * took:,.1f} ms", note))
    if (mfu := run.median("mfu")) is not None:
        found.append(KeyFigure("MFU", percent(mfu), "median of the steps"))
    return found


def buckets(run: RunHistory) -> list[tuple[str, str, float, float]]:
    """(bucket, what it is, seconds, share), the ones that took any time, most first; they add up to all."""
    whole = run.elapsed or 1.0
    rows = [(name, ALL[name], value, value / whole) for name, value in run.seconds.items() if value > 0]
    return sorted(rows, key=lambda row: -row[2])


def lives(run: RunHistory) -> list[tuple[str, str, str, str, str, str]]:
    """(when it began, steps, how long, in training steps, down until the next, how it ended) of the newest lives."""
    rows = []
    for life, after in zip(run.lives, [*run.lives[1:], None]):
        down = "" if after is None else format_seconds(max(0.0, after.began - life.began - life.elapsed))
        share = percent(life.seconds["compute"] / life.elapsed) if life.elapsed else "-"
        lived = format_seconds(life.elapsed)
        rows.append((when(life.began), steps_of(life), lived, share, down, life.cause or run.state))
    return rows[-MOST:]


def failed(run: RunHistory) -> list[str]:
    """Generations that ended before they trained, a line each."""
    return [
        f"generation {event.get('generation')} ended before it trained: {clean(str(event.get('cause')))}"
        for event in run.failed
    ][-MOST:]


def checkpoints(run: RunHistory) -> list[tuple[str, str, str, str]]:
    """(step, size, seconds until it was on disk, seconds that training waited) of the newest."""
    return [
        (_text(save.get("step")), _text(save.get("size")), _text(save.get("seconds")), _text(save.get("stall")))
        for save in run.saves[-MOST:]
    ]


def scores(run: RunHistory) -> list[tuple[str, str, str, str]]:
    """(metric, first, last, lowest with its step) of every validation metric."""
    rows = []
    for name, series in run.scores().items():
        known = [pair for pair in series if pair[1] == pair[1]]
        if known:
            step, low = min(known, key=lambda pair: pair[1])
            lowest = f"{number(low)} at {step:,}"
            rows.append((name.removeprefix("eval/"), number(known[0][1]), number(known[-1][1]), lowest))
    return rows


def notices(run: RunHistory) -> list[str]:
    """Warnings, hangs and other events, a line each with its time."""
    events = sorted([*run.warnings, *run.others], key=lambda event: str(event.get("time")))
    return [f"{_clock(event)}  {_line(event)}" for event in events[-MOST:]]


def when(seconds: float) -> str:
    """Local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def steps_of(life: Attempt) -> str:
    """The steps of a life: `101-250`."""
    return f"{life.first + 1:,}-{life.last:,}" if life.last > life.first else "none"


def _line(event: Any) -> str:
    fields = {key: value for key, value in event.items() if key not in ("time", "kind")}
    if event.get("kind") == "warning" and set(fields) <= {"text", "step"}:
        return clean(str(fields.get("text")))
    return clean(event_line(str(event.get("kind")), fields))


def _clock(event: Any) -> str:
    return str(event.get("time"))[:19].replace("T", " ")


def _first(run: RunHistory, key: str) -> float | None:
    series: Sequence[tuple[int, float]] = run.series(key)
    return series[0][1] if series else None


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else clean(str(value))
