"""Plots of a plan as SVG, coloured by the classes of `jaxtrain.planning.report.page`'s style sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log10

from jaxtrain.io import svg
from jaxtrain.io.svg import LETTER_WIDTH, WIDTH
from jaxtrain.planning.hardware import calibration, chips
from jaxtrain.planning.report import values
from jaxtrain.planning.result import Plan

NAMES = 200  # width of the names on the left of bars
FIGURES = 150  # width of the figures on the right of bars


def memory(plan: Plan) -> str:
    """Plots the memory of a device by kind, stacked, against usable and total memory; empty if unknown."""
    rows = values.memory_rows(plan)
    if not rows:
        return ""
    total = values.chip_memory(plan)
    end = 1.02 * max(plan.needs, plan.usable or 0, total, sum(size for *_, size in rows))
    unit = values.byte_unit([end])
    left, right, top, height = 10, WIDTH - 20, 42, 46

    def to_x(size: float) -> float:
        return left + size / end * (right - left)

    out, start = [svg.rect(to_x(0), top, to_x(end) - to_x(0), height, "track")], 0.0
    for kind, name, size in rows:
        width = to_x(start + size) - to_x(start)
        out.append(svg.rect(to_x(start), top, width, height, kind, f"{name}: {unit(size)}"))
        start += size
    out += _ticks(to_x, end, unit, top + height)
    # The label of the line further right is higher.
    for limit, name, above in ((plan.usable, "usable", 18), (total, "of the chip", 34)):
        if limit:
            x, anchor, shift = to_x(limit), "start", 5
            if x > 0.5 * WIDTH:
                anchor, shift = "end", -5
            out.append(svg.line(x, top - above, x, top + height, "limit"))
            out.append(svg.text(x + shift, top - above + 10, f"{name}: {unit(limit)}", anchor))
    return svg.drawing(top + height + 30, out, "memory of a device by kind")


def time(plan: Plan) -> str:
    """Plots the parts of a step's time, one bar after the other; empty if unknown."""
    parts = values.time_parts(plan)
    if not parts:
        return ""
    end = sum(part.seconds for part in parts)
    unit = values.time_unit([end])
    row, top = 26, 8
    bottom = top + row * len(parts)

    def to_x(seconds: float) -> float:
        return NAMES + seconds / end * (WIDTH - NAMES - FIGURES)

    out, start = list(_ticks(to_x, end, unit, bottom)), 0.0
    for index, part in enumerate(parts):
        y, stop = top + row * index, start + part.seconds
        figures = f"{unit(part.seconds)}, {part.seconds / end:.1%}"
        width = max(1.0, to_x(stop) - to_x(start))
        out.append(svg.text(NAMES - 10, y + 17, svg.shorten(part.name, NAMES - 10), "end"))
        out.append(svg.rect(to_x(start), y + 3, width, row - 6, part.group, f"{part.name}: {figures}"))
        out.append(svg.text(to_x(stop) + 8, y + 17, figures, "start"))
        start = stop
    return svg.drawing(bottom + 30, out, "time of a step by part")


def roofline(plan: Plan) -> str:
    """Plots FLOP/s over FLOPs per byte: the roofs of the chip and the rates of the step; empty if unknown.

    The solid roof has the chip's published figures, the dashed one the fractions of them that programs reach.
    """
    chip = values.chip_of(plan)
    if chip is None or plan.compute_seconds is None:
        return ""
    shares = calibration.calibration_of(chips.chip_kind(chip))
    peak, bandwidth = chip.flops("bf16"), float(chip.bandwidth)
    ridge = peak / bandwidth
    axes = LogAxes(1.0, 10 ** (int(log10(ridge)) + 2), peak / 1000, 4 * peak)
    out = [
        *axes.grid(), _roof(axes, peak, bandwidth, "roof"),
        _roof(axes, peak * shares.matmul, bandwidth * shares.memory, "roof dashed"),
        svg.text(axes.right - 6, axes.y(peak) - 7, f"peak {values.format_si(peak, 'FLOP/s')} (bf16)", "end"),
        svg.text(
            axes.x(ridge / 12) + 8, axes.y(peak / 12) - 16, f"memory {values.format_si(bandwidth, 'B/s')}", "end"
        ),
    ]  # fmt: skip
    # The line of the step is the lower one, so its label is below.
    for name, seconds, shift in (("computing", plan.compute_seconds, -6), ("the whole step", plan.step_seconds, 15)):
        if plan.flops_compiled and seconds:
            rate = plan.flops_compiled / seconds
            out.append(svg.line(axes.left, axes.y(rate), axes.right, axes.y(rate), "level"))
            label = f"{name}: {values.format_si(rate, 'FLOP/s')}"
            out.append(svg.text(axes.left + 8, axes.y(rate) + shift, label, "start"))
    out += _points(plan, axes)
    return svg.drawing(axes.bottom + 44, out, "roofline")


def _points(plan: Plan, axes: LogAxes) -> Iterator[str]:
    """Points for the parts of the step that multiply, labelled below."""
    seconds, flops, size = (by.get("part", {}) for by in (plan.seconds_by, plan.flops_by, plan.bytes_by))
    parts = [(flops[name] / size[name], flops[name] / seconds[name], name) for name in flops if seconds.get(name)]
    points = sorted((part for part in parts if axes.contains(*part[:2])), reverse=True)
    if not points:
        return
    lowest = max(axes.y(rate) for _, rate, _ in points)
    labels = [f"{name}: {values.format_si(rate, 'FLOP/s')}" for _, rate, name in points]
    end = min(axes.x(points[0][0]) + 60, axes.right - LETTER_WIDTH * max(map(len, labels)))
    for row, (intensity, rate, _) in enumerate(points):  # from the right, so that no line crosses another
        x, y, below = axes.x(intensity), axes.y(rate), lowest + 60 + 22 * row
        yield svg.polyline([(x, y), (end - 6, below - 4)], "leader")
        yield svg.circle(x, y, 5, "point")
        yield svg.text(end, below, labels[row], "start")


class LogAxes:
    """Two logarithmic axes: FLOPs per byte to the right, FLOP/s upwards."""

    left, right, top, bottom = 110.0, WIDTH - 30.0, 14.0, 360.0

    def __init__(self, x0: float, x1: float, y0: float, y1: float):
        self.limits = (x0, x1, y0, y1)

    def x(self, value: float) -> float:
        """Position of an intensity, from the left."""
        x0, x1, *_ = map(log10, self.limits)
        return self.left + (log10(value) - x0) / (x1 - x0) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Position of a rate, from the top."""
        *_, y0, y1 = map(log10, self.limits)
        return self.bottom - (log10(value) - y0) / (y1 - y0) * (self.bottom - self.top)

    def contains(self, x: float, y: float) -> bool:
        """Returns whether a point is inside the axes."""
        x0, x1, y0, y1 = self.limits
        return x0 <= x <= x1 and y0 <= y <= y1

    def grid(self) -> Iterator[str]:
        """Draws lines and labels at powers of ten, and the label of the x axis."""
        x0, x1, y0, y1 = self.limits
        for value in _powers_of_ten(x0, x1):
            x = self.x(value)
            yield svg.line(x, self.top, x, self.bottom, "grid")
            yield svg.text(x, self.bottom + 17, f"{value:,.0f}", "middle")
        for value in _powers_of_ten(y0, y1):
            y = self.y(value)
            yield svg.line(self.left, y, self.right, y, "grid")
            yield svg.text(self.left - 8, y + 4, values.format_si(value, "FLOP/s"), "end")
        middle = (self.left + self.right) / 2
        yield svg.text(middle, self.bottom + 38, "FLOPs for each byte read or written in memory", "middle")


def _powers_of_ten(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(-int(-log10(low) // 1), int(log10(high) // 1) + 1)]


def _roof(axes: LogAxes, peak: float, bandwidth: float, style: str) -> str:
    """Draws the slope of a bandwidth and the level of a peak."""
    x0, x1, y0, _ = axes.limits
    start = max(x0, y0 / bandwidth)
    points = [(start, start * bandwidth), (peak / bandwidth, peak), (x1, peak)]
    return svg.polyline(((axes.x(x), axes.y(y)) for x, y in points), style)


def _ticks(to_x: Callable[[float], float], end: float, unit: values.Unit, y: float) -> Iterator[str]:
    """Draws round figures of an axis below `y`."""
    step = svg.tick_step(end / unit.factor / 6)
    value = 0.0
    while value * unit.factor <= end:
        x = to_x(value * unit.factor)
        yield svg.line(x, y, x, y + 5, "axis")
        label, anchor = (f"{value:,.6g}", "middle") if value else (f"0 {unit.name}", "start")
        yield svg.text(x, y + 19, label, anchor)
        value += step
