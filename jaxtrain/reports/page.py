"""Run report as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from jaxtrain.io import html, svg
from jaxtrain.reports import tables
from jaxtrain.reports.history import ALL_BUCKETS, Attempt, RunHistory, format_seconds
from jaxtrain.trackers.console import count, number, small

COLOURS = {
    "compute": ("#4c9a4c", "#74c274"), "data": ("#d09c10", "#e5bb4a"), "compile": ("#3b74c0", "#6ca0e8"),
    "init": ("#868d96", "#a3abb5"), "checkpoint": ("#14909b", "#45bcc6"), "restore": ("#7a5cc0", "#a58ce6"),
    "eval": ("#5f9ea0", "#8fc7c9"), "replay": ("#b4509a", "#d983c2"), "down": ("#c9474f", "#f0787e"),
    "curve": ("#2f6db3", "#6ca0e8"), "scores": ("#d1495b", "#f0787e"), "restart": ("#868d96", "#a3abb5"),
}  # fmt: skip
STYLE = """
.curve { fill: none; stroke: var(--curve); stroke-width: 2; }
.scores { fill: none; stroke: var(--scores); stroke-width: 1.5; } circle.scores { fill: var(--scores); }
.restart { stroke: var(--restart); stroke-dasharray: 3 4; }
"""
LEFT, RIGHT = 80, svg.WIDTH - 20
HEIGHT = 240  # of a plot
MAX_POINTS = 600  # of a curve
MAX_BARS = 40  # attempts in the timeline
# Order of the buckets in an attempt, mostly.
ORDER = ("init", "restore", "compile", "replay", "data", "compute", "eval", "checkpoint")
Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]


def page(run: RunHistory) -> str:
    """Builds the report as an HTML document."""
    sections = {
        "Where the time went": _goodput(run),
        "Loss": html.scrollable(curve(run, "loss", "loss over steps", ("eval/loss", "validation"))),
        "Learning rate": html.scrollable(curve(run, "lr", "learning rate over steps", high=110)),
        "Throughput": html.scrollable(curve(run, "tokens_per_sec", "tokens a second over steps")),
        "Starts and ends": _attempts(run),
        "Validation": _table(("metric", "first", "last", "lowest"), tables.scores(run), (1, 2, 3)),
        "Checkpoints": _table(
            ("step", "size", "seconds until on disk", "seconds training waited"), tables.checkpoints(run), (0, 1, 2, 3)
        ),
        "Warnings and other events": html.bullet_list(lines) if (lines := tables.notices(run)) else "",
    }
    style = html.colour_css(COLOURS) + STYLE
    return html.page(f"{run.name}: report", _headline(run), sections, style)


def _headline(run: RunHistory) -> str:
    good = "good" if run.state == "finished" or run.state.startswith("running") else "bad"
    return f"""<header><h1>{escape(run.name)}</h1>
<p class="dim">{escape(str(run.directory))}; began {tables.format_time(run.attempts[0].began)}</p>
<p><span class="verdict {good}">{escape(run.state.capitalize())}</span></p>
{html.cards(tables.facts(run))}</header>"""


def _goodput(run: RunHistory) -> str:
    if run.goodput is None:
        return html.remark("Unknown: the run recorded no time accounting.")
    spent = tables.buckets(run)
    rows: list[Sequence[str]] = [
        (html.swatch(name, what), format_seconds(seconds), f"{share:.1%}") for name, what, seconds, share in spent
    ]
    rows.append(("total", format_seconds(run.elapsed), "100.0%"))
    note = "Process 0, over all restarts. Every second counts in one line."
    table = html.table(("", "time", "share"), rows, (1, 2), total=True)
    return f"{html.scrollable(shares(run))}\n{html.remark(note)}\n{table}"


def _attempts(run: RunHistory) -> str:
    titles = ("began", "steps", "duration", "in training steps", "down after it", "how it ended")
    table = html.table(titles, tables.attempts(run), (2, 3, 4))
    lines = tables.failed_generations(run)
    return f"{html.scrollable(timeline(run))}\n{table}\n{html.bullet_list(lines) if lines else ''}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    return html.table(titles, rows, numbers) if rows else ""


def shares(run: RunHistory) -> str:
    """Draws the time as one bar, in the order of `ALL_BUCKETS`."""
    out, at = [], 10.0
    for name in ALL_BUCKETS:
        wide = run.seconds[name] / run.elapsed * (svg.WIDTH - 20)
        if wide > 0:
            title = f"{ALL_BUCKETS[name]}: {format_seconds(run.seconds[name])}, {run.seconds[name] / run.elapsed:.1%}"
            out.append(svg.rect(at, 4, wide, 40, name, title))
            at += wide
    return svg.drawing(50, out, "where the time went")


def timeline(run: RunHistory) -> str:
    """Draws a bar of stacked buckets for each of the newest attempts over time; empty for a single attempt."""
    attempts = run.attempts[-MAX_BARS:]
    if len(attempts) < 2:
        return ""
    begin, end = attempts[0].began, max(attempt.ended for attempt in attempts)
    row, top, span = 16, 6, max(end - begin, 1e-9)
    bottom = top + row * len(attempts)

    def at(seconds: float) -> float:
        return LEFT + (seconds - begin) / span * (RIGHT - LEFT)

    out = list(_ticks(lambda value: at(begin + value), 0.0, span, bottom, format_seconds))
    for index, attempt in enumerate(attempts):
        y = top + row * index
        out.append(svg.text(LEFT - 8, y + 12, svg.shorten(tables.step_range(attempt), LEFT - 10), "end"))
        out += _stack(attempt, at, y, row - 3)
    return svg.drawing(bottom + 28, out, "attempts of the run")


def _stack(attempt: Attempt, at: Scale, y: float, high: float) -> Iterator[str]:
    place = attempt.began
    for name in ORDER:
        seconds = attempt.seconds.get(name, 0.0)
        x0, x1 = at(place), at(place + seconds)
        if seconds > 0:
            yield svg.rect(x0, y, x1 - x0, high, name, f"{ALL_BUCKETS[name]}: {format_seconds(seconds)}")
        place += seconds


def curve(run: RunHistory, key: str, what: str, beside: tuple[str, str] | None = None, high: int = HEIGHT) -> str:
    """Draws a metric over steps, smoothed, with restarts as dotted lines.

    Args:
        run: the run.
        key: the metric.
        what: description of the plot.
        beside: another metric, drawn as dots, and its name.
        high: height of the plot.
    """
    points = _finite(run.series(key))
    other = _finite(run.series(beside[0])) if beside else []
    if len(points) < 2:
        return ""
    x0, x1 = points[0][0], points[-1][0]
    smooth = downsampled(points, MAX_POINTS)
    low, top = _limits([value for _, value in smooth] + [value for _, value in other])

    def x(step: float) -> float:
        return LEFT + (step - x0) / (x1 - x0) * (RIGHT - LEFT)

    def y(value: float) -> float:
        return 10 + (top - min(max(value, low), top)) / (top - low) * (high - 10)

    out = [*_levels(y, low, top), *_ticks(x, x0, x1, high, lambda value: f"{value:,.6g}")]
    out += [
        svg.line(x(attempt.first), 10, x(attempt.first), high, "restart")
        for attempt in run.attempts[1:]
        if x0 <= attempt.first
    ]
    out.append(_polyline(((x(a), y(b)) for a, b in smooth), "curve"))
    label = f"{key}, last {_figure(points[-1][1])}"
    if other and beside:
        out.append(_polyline(((x(a), y(b)) for a, b in other), "scores"))
        out += [f'<circle class="scores" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in downsampled(other, 100)]
        label += f"; {beside[1]} (dots), last {_figure(other[-1][1])}"
    out.append(svg.text(RIGHT, 22, label, "end"))
    return svg.drawing(high + 28, out, what)


def downsampled(points: Points, most: int) -> list[tuple[float, float]]:
    """Reduces points to `most` means of neighbours, so that the page of a million steps stays small."""
    size = max(1, math.ceil(len(points) / most))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(sum(a for a, _ in group) / len(group), sum(b for _, b in group) / len(group)) for group in groups]


def _finite(points: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in points if math.isfinite(value)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    pad = 0.04 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 1.0
    return min(values) - pad, max(values) + pad


def _levels(y: Scale, low: float, top: float) -> Iterator[str]:
    step = svg.tick_step((top - low) / 5)
    value = math.ceil(low / step) * step
    while value <= top:
        height = y(value)
        yield svg.line(LEFT, height, RIGHT, height, "grid")
        yield svg.text(LEFT - 8, height + 4, _figure(value), "end")
        value += step


def _ticks(x: Scale, low: float, high: float, y: float, shown: Callable[[float], str]) -> Iterator[str]:
    """Draws round figures along an axis below `y`."""
    step = svg.tick_step((high - low) / 6)
    value = math.ceil(low / step) * step
    while value <= high:
        place = x(value)
        yield svg.line(place, y, place, y + 5, "axis")
        anchor = "end" if place > RIGHT - 40 else "middle"
        yield svg.text(place, y + 19, shown(value), anchor)
        value += step


def _figure(value: float) -> str:
    return count(value) if abs(value) >= 1000 else small(value) if 0 < abs(value) < 0.01 else number(round(value, 6))


def _polyline(points: Iterable[tuple[float, float]], style: str) -> str:
    return f'<polyline class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
