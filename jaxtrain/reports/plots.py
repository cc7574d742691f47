"""Plots of a run report as SVG: where the time went, the attempts over time, metrics over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jaxtrain.errors import escape_unprintable
from jaxtrain.io import svg
from jaxtrain.reports import tables
from jaxtrain.reports.history import ALL_BUCKETS, Attempt, RunHistory, format_seconds
from jaxtrain.trackers.console import count, number, small

LEFT, RIGHT = 80, svg.WIDTH - 20
HEIGHT = 240  # of a plot
MAX_POINTS = 600  # of a curve
LINES = 8  # colours of curves in one plot
MAX_BARS = 40  # attempts in the timeline
# Order of the buckets in an attempt, mostly.
ORDER = ("init", "restore", "compile", "replay", "data", "compute", "exchange", "eval", "checkpoint")
Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]


def time_bar(run: RunHistory) -> str:
    """Draws the time as one bar, in the order of `ALL_BUCKETS`."""
    elements, x = [], 10.0
    for name, description in ALL_BUCKETS.items():
        share = run.seconds[name] / run.elapsed
        if share > 0:
            title = f"{description}: {format_seconds(run.seconds[name])}, {share:.1%}"
            elements.append(svg.rect(x, 4, share * (svg.WIDTH - 20), 40, name, title))
            x += share * (svg.WIDTH - 20)
    return svg.drawing(50, elements, "where the time went")


def timeline(run: RunHistory) -> str:
    """Draws a bar of stacked buckets for each of the newest attempts over time; empty for a single attempt."""
    attempts = run.attempts[-MAX_BARS:]
    if len(attempts) < 2:
        return ""
    begin, end = attempts[0].began, max(attempt.ended for attempt in attempts)
    row, top, span = 16, 6, max(end - begin, 1e-9)
    bottom = top + row * len(attempts)

    def x(seconds: float) -> float:
        return LEFT + (seconds - begin) / span * (RIGHT - LEFT)

    elements = list(_ticks(lambda value: x(begin + value), 0.0, span, bottom, format_seconds))
    for index, attempt in enumerate(attempts):
        y = top + row * index
        elements.append(svg.text(LEFT - 8, y + 12, svg.shorten(tables.step_range(attempt), LEFT - 10), "end"))
        elements += _stack(attempt, x, y, row - 3)
    return svg.drawing(bottom + 28, elements, "attempts of the run")


def _stack(attempt: Attempt, x: Scale, y: float, height: float) -> Iterator[str]:
    start = attempt.began
    for name in ORDER:
        seconds = attempt.seconds.get(name, 0.0)
        if seconds > 0:
            title = f"{ALL_BUCKETS[name]}: {format_seconds(seconds)}"
            yield svg.rect(x(start), y, x(start + seconds) - x(start), height, name, title)
        start += seconds


def curve(run: RunHistory, key: str, label: str, overlay: tuple[str, str] | None = None, height: int = HEIGHT) -> str:
    """Draws a metric over steps, smoothed, with restarts as dotted lines.

    Args:
        run: the run.
        key: the metric.
        label: description of the plot.
        overlay: another metric, drawn as dots, and its name.
        height: height of the plot.
    """
    points = _finite(run.series(key))
    dots = _finite(run.series(overlay[0])) if overlay else []
    if not _spans_steps(points):
        return ""
    first, last = points[0][0], points[-1][0]
    smooth = downsample(points, MAX_POINTS)
    x, y, elements = _axes(first, last, [value for _, value in smooth + dots], height)
    restarts = [x(attempt.first) for attempt in run.attempts[1:] if first <= attempt.first]
    elements += [svg.line(at, 10, at, height, "restart") for at in restarts]
    elements.append(svg.polyline(((x(step), y(value)) for step, value in smooth), "curve"))
    caption = f"{escape_unprintable(key)}, last {_format(points[-1][1])}"
    if dots and overlay:
        elements.append(svg.polyline(((x(step), y(value)) for step, value in dots), "scores"))
        elements += [svg.circle(x(step), y(value), 3, "scores") for step, value in downsample(dots, 100)]
        caption += f"; {overlay[1]} (dots), last {_format(dots[-1][1])}"
    elements.append(svg.text(RIGHT, 22, caption, "end"))
    return svg.drawing(height + 28, elements, label)


def curves(named: Mapping[str, Iterable[tuple[int, float]]], label: str, height: int = HEIGHT) -> str:
    """Draws several series in one plot, of the classes `line-0` to `line-7` in turn; empty without two steps.

    Args:
        named: name -> (step, value).
        label: description of the plot.
        height: height of the plot.
    """
    finite = {name: points for name, series in named.items() if _spans_steps(points := _finite(series))}
    if not finite:
        return ""
    smooth = [downsample(points, MAX_POINTS) for points in finite.values()]
    first, last = min(points[0][0] for points in smooth), max(points[-1][0] for points in smooth)
    x, y, elements = _axes(first, last, [value for points in smooth for _, value in points], height)
    for index, (name, points) in enumerate(zip(finite, smooth)):
        style = f"line-{index % LINES}"
        elements.append(svg.polyline(((x(step), y(value)) for step, value in points), style))
        elements.append(svg.rect(RIGHT - 140, 14 + 16 * index, 11, 11, style))
        elements.append(svg.text(RIGHT - 122, 24 + 16 * index, f"{name}, last {_format(points[-1][1])}", "start"))
    return svg.drawing(height + 28, elements, label)


def downsample(points: Points, most: int) -> list[tuple[float, float]]:
    """Reduces points to `most` means of neighbours, so that the page of a million steps stays small."""
    size = max(1, math.ceil(len(points) / most))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(sum(a for a, _ in group) / len(group), sum(b for _, b in group) / len(group)) for group in groups]


def _finite(points: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in points if math.isfinite(value)]


def _spans_steps(points: Points) -> bool:
    return bool(points) and points[0][0] < points[-1][0]


def _axes(first: float, last: float, values: Sequence[float], height: float) -> tuple[Scale, Scale, list[str]]:
    """Returns (x of a step, y of a value, elements of the axes) of a plot of these values from step to step."""
    low, high = _limits(values)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (RIGHT - LEFT)

    def y(value: float) -> float:
        return 10 + (high - value) / (high - low) * (height - 10)

    return x, y, [*_levels(y, low, high), *_ticks(x, first, last, height, lambda value: f"{value:,.6g}")]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    pad = 0.04 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 1.0
    return min(values) - pad, max(values) + pad


def _levels(y: Scale, low: float, high: float) -> Iterator[str]:
    """Draws horizontal grid lines at round values."""
    for value in svg.ticks(low, high, 5):
        yield svg.line(LEFT, y(value), RIGHT, y(value), "grid")
        yield svg.text(LEFT - 8, y(value) + 4, _format(value), "end")


def _ticks(x: Scale, low: float, high: float, y: float, label: Callable[[float], str]) -> Iterator[str]:
    """Draws round values along an axis at height `y`."""
    for value in svg.ticks(low, high, 6):
        yield svg.line(x(value), y, x(value), y + 5, "axis")
        yield svg.text(x(value), y + 19, label(value), "end" if x(value) > RIGHT - 40 else "middle")


def _format(value: float) -> str:
    return count(value) if abs(value) >= 1000 else small(value) if 0 < abs(value) < 0.01 else number(round(value, 6))
