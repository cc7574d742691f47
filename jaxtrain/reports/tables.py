"""Figures and table rows of run reports, as text."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from jaxtrain.errors import escape_unprintable
from jaxtrain.reports.history import ALL_BUCKETS, Attempt, RunHistory, format_seconds, uncounted_seconds
from jaxtrain.trackers.console import count, event_line, number, own_metrics, percent

MAX_ROWS = 20  # of a table; the newest are kept
MAX_NAME = 40  # of a metric
SLOW, MAX_SLOW = 3, 5  # times the median above which a step is slow, and how many of them are named


class KeyFigure(NamedTuple):
    """Figure of the headline."""

    name: str
    value: str
    note: str


def key_figures(run: RunHistory) -> list[KeyFigure]:
    """Returns the figures of the headline."""
    best = [pair for pair in run.series("eval/loss") if pair[1] == pair[1]]
    low = min(best, key=lambda pair: pair[1], default=None)
    steps = f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    restarts, loss = max(0, len(run.attempts) - 1), run.series("loss")
    figures = [
        KeyFigure("goodput", percent(run.goodput), f"training steps in {format_seconds(run.elapsed)} of wall time"),
        KeyFigure("steps", steps, f"{restarts} restart{'' if restarts == 1 else 's'}"),
        KeyFigure("loss", number(run.last("loss")), f"first {number(loss[0][1] if loss else None)}"),
    ]
    if low is not None:
        note = f"lowest {number(low[1])} at step {low[0]:,}"
        figures.append(KeyFigure("validation loss", number(run.last("eval/loss")), note))
    for name in own_curves(run):
        first = run.series(name)[0][1]
        figures.append(KeyFigure(shown(name), number(run.last(name)), f"first {number(first)}"))
    if (rate := run.median(f"{run.unit}_per_sec")) is not None:
        note = f"median of the steps; {count(run.throughput())} over the whole time"
        figures.append(KeyFigure("throughput", f"{count(rate)} {'tok' if run.unit == 'tokens' else run.unit}/s", note))
    if (took := run.median("step_time")) is not None:
        note = f"median; of it {_step_time(run.median('data_wait') or 0.0)} waiting for data"
        figures.append(KeyFigure("step time", _step_time(took), note))
    if (mfu := run.median("mfu")) is not None:
        figures.append(KeyFigure("MFU", percent(mfu), "median of the steps"))
    return figures


def own_curves(run: RunHistory) -> list[str]:
    """Returns the names of the first metrics of a user that the last logged step has."""
    last = next((record for record in reversed(run.metrics) if "loss" in record), {})  # not one of scores alone
    return [name for name in own_metrics(last) if run.series(name)]


def shown(name: str) -> str:
    """Returns the name of a metric in one printable line."""
    return escape_unprintable(name)[:MAX_NAME]


def buckets(run: RunHistory) -> list[tuple[str, str, float, float]]:
    """Returns (bucket, description, seconds, share) of the buckets with any time, largest first."""
    total = run.elapsed or 1.0
    rows = [(name, ALL_BUCKETS[name], value, value / total) for name, value in run.seconds.items() if value > 0]
    return sorted(rows, key=lambda row: -row[2])


def slow_steps(run: RunHistory) -> list[tuple[str, str, str]]:
    """Returns (step, step time, of it waiting for data) of the slowest logged steps, if far above the median.

    Those take more than `SLOW` times the median step time, or wait for data longer than the median by a median step.
    """
    usual, usual_wait = run.median("step_time") or 0.0, run.median("data_wait") or 0.0
    waits = dict(run.series("data_wait"))
    rows = [(step, took, waits.get(step, 0.0)) for step, took in run.series("step_time")]
    slow = [row for row in rows if row[1] > SLOW * usual or row[2] > usual + usual_wait]
    slowest = sorted(slow, key=lambda row: -row[1])[:MAX_SLOW]
    return [(f"{step:,}", _step_time(took), _step_time(wait)) for step, took, wait in slowest]


def slow_steps_note(run: RunHistory) -> str:
    """Returns how many steps were compared, and what their times are if not every step is logged."""
    steps = sorted({int(record["step"]) for record in run.metrics})
    is_each = all(after - before == 1 for before, after in pairwise(steps))
    means = "" if is_each else "; times are means since the logged step before"
    return f"of {len(run.series('step_time')):,} logged steps{means}"


def attempts(run: RunHistory) -> list[tuple[str, str, str, str, str, str]]:
    """Returns (start time, steps, duration, training share, downtime after it, cause of the end) of the newest."""
    rows = []
    for attempt, after in zip(run.attempts, [*run.attempts[1:], None]):
        down = "" if after is None or attempt.is_finished else format_seconds(uncounted_seconds(attempt, after))
        share = percent(attempt.seconds["compute"] / attempt.elapsed) if attempt.elapsed else "-"
        lived = format_seconds(attempt.elapsed)
        rows.append((format_time(attempt.began), step_range(attempt), lived, share, down, attempt.cause or run.state))
    return rows[-MAX_ROWS:]


def failed_generations(run: RunHistory) -> list[str]:
    """Returns a line for each generation that ended before it trained."""
    return [
        f"generation {event.get('generation')} ended before it trained: {escape_unprintable(str(event.get('cause')))}"
        for event in run.failed_generations
    ][-MAX_ROWS:]


def checkpoints(run: RunHistory) -> list[tuple[str, ...]]:
    """Returns (step, size, seconds until it was on disk, seconds that training waited) of the newest."""
    names = ("step", "size", "seconds", "stall")
    return [tuple(_text(save.get(name)) for name in names) for save in run.saves[-MAX_ROWS:]]


def scores(run: RunHistory) -> list[tuple[str, ...]]:
    """Returns (metric, first, last, lowest and highest with their steps) of every validation metric."""
    rows = []
    for name, series in run.scores().items():
        pairs = [pair for pair in series if pair[1] == pair[1]]  # without nan
        if pairs:
            extremes = [best(pairs, key=lambda pair: pair[1]) for best in (min, max)]
            texts = [f"{number(value)} at {step:,}" for step, value in extremes]
            rows.append((name.removeprefix("eval/"), number(pairs[0][1]), number(pairs[-1][1]), *texts))
    return rows


def notices(run: RunHistory) -> list[str]:
    """Returns warnings, hangs and other events, one line each with its time."""
    events = sorted([*run.warnings, *run.other_events], key=lambda event: str(event.get("time")))
    return [f"{_clock(event)}  {_line(event)}" for event in events[-MAX_ROWS:]]


def format_time(seconds: float) -> str:
    """Formats Unix seconds as local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def step_range(attempt: Attempt) -> str:
    """Formats the steps of an attempt: `101-250`."""
    return f"{attempt.first + 1:,}-{attempt.last:,}" if attempt.last > attempt.first else "none"


def _step_time(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _line(event: Any) -> str:
    fields = {key: value for key, value in event.items() if key not in ("time", "kind")}
    if event.get("kind") == "warning" and set(fields) <= {"text", "step"}:
        return escape_unprintable(str(fields.get("text")))
    return escape_unprintable(event_line(str(event.get("kind")), fields))


def _clock(event: Any) -> str:
    return str(event.get("time"))[:19].replace("T", " ")


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else escape_unprintable(str(value))
