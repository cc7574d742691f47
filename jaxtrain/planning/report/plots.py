"""Plots of a plan as SVG text, coloured by the classes of `jaxtrain.planning.report.page`'s style sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log10

from jaxtrain.io import svg
from jaxtrain.io.svg import LETTER_WIDTH, WIDTH
from jaxtrain.planning.hardware import calibration, chips
from jaxtrain.planning.report import values
from jaxtrain.planning.result import Plan

LABEL = 200  # of the names on the left of bars
AFTER = 150  # of the figures on the right of them


def memory(plan: Plan) -> str:
    """Plots what fills a device's memory, stacked, against what a program may take and what the chip has; or empty."""
    rows = values.memory(plan)
    if not rows:
        return ""
    total = values.installed(plan)
    end = 1.02 * max(plan.needs, plan.usable or 0, total, sum(size for *_, size in rows))
    unit = values.byte_scale([end])
    left, right, top, high = 10, WIDTH - 20, 42, 46

    def at(size: float) -> float:
        return left + size / end * (right - left)

    out, start = [svg.rect(at(0), top, at(end) - at(0), high, "track")], 0.0
    for kind, name, size in rows:
        out.append(svg.rect(at(start), top, at(start + size) - at(start), high, kind, f"{name}: {unit(size)}"))
        start += size
    out += _ticks(at, end, unit, top + high)
    for limit, name in ((plan.usable, "usable"), (total, "of the chip")):
        if limit:
            anchor = "end" if at(limit) > 0.5 * WIDTH else "start"
            height = 18 if name == "usable" else 34  # the upper label is that of the line on the right
            out.append(svg.line(at(limit), top - height, at(limit), top + high, "limit"))
            shift = -5 if anchor == "end" else 5
            out.append(svg.text(at(limit) + shift, top - height + 10, f"{name}: {unit(limit)}", anchor))
    return svg.drawing(top + high + 30, out, "memory of a device by kind")


def times(plan: Plan) -> str:
    """Plots the parts of a step's time, one bar after the other; empty if unknown."""
    parts = values.times(plan)
    if not parts:
        return ""
    end = sum(part.seconds for part in parts)
    unit = values.time_scale([end])
    row, top = 26, 8
    bottom = top + row * len(parts)

    def at(seconds: float) -> float:
        return LABEL + seconds / end * (WIDTH - LABEL - AFTER)

    out, start = list(_ticks(at, end, unit, bottom)), 0.0
    for index, part in enumerate(parts):
        y = top + row * index
        stop = start + part.seconds
        said = f"{unit(part.seconds)}, {part.seconds / end:.1%}"
        out.append(svg.text(LABEL - 10, y + 17, svg.shorten(part.name, LABEL - 10), "end"))
        out.append(
            svg.rect(at(start), y + 3, max(1.0, at(stop) - at(start)), row - 6, part.group, f"{part.name}: {said}")
        )
        out.append(svg.text(at(stop) + 8, y + 17, said, "start"))
        start = stop
    return svg.drawing(bottom + 30, out, "time of a step by what it goes into")


def roofline(plan: Plan) -> str:
    """FLOP/s that a chip allows by FLOPs per byte of memory traffic, and what the step achieves; empty if unknown.

    Two roofs: the chip's published figures, and below, dashed, the shares of them that programs achieve.
    """
    chip = values.chip_of(plan)
    if chip is None or plan.compute_seconds is None:
        return ""
    shares = calibration.of_kind(chips.kind_of(chip))
    peak, bandwidth = chip.flops("bf16"), float(chip.bandwidth)
    field = Field(1.0, 10 ** (int(log10(peak / bandwidth)) + 2), peak / 1000, 4 * peak)
    out = [*field.grid(), *_roof(field, peak, bandwidth, "roof")]
    out += _roof(field, peak * shares.matmul, bandwidth * shares.memory, "roof dashed")
    ridge = peak / bandwidth
    names = [f"peak {values.prefixed(peak, 'FLOP/s')} (bf16)", f"memory {values.prefixed(bandwidth, 'B/s')}"]
    out.append(svg.text(field.right - 6, field.y(peak) - 7, names[0], "end"))
    out.append(svg.text(field.x(ridge / 12) + 8, field.y(peak / 12) - 16, names[1], "end"))
    levels = {"computing": plan.compute_seconds, "the whole step": plan.step_seconds}
    for (name, seconds), above in zip(levels.items(), (-6, 15)):  # the step's is the lower line, and its label below
        if plan.flops_compiled and seconds:
            rate = plan.flops_compiled / seconds
            out.append(svg.line(field.left, field.y(rate), field.right, field.y(rate), "level"))
            out.append(
                svg.text(field.left + 8, field.y(rate) + above, f"{name}: {values.prefixed(rate, 'FLOP/s')}", "start")
            )
    out += _points(plan, field)
    return svg.drawing(field.bottom + 44, out, "roofline")


def _points(plan: Plan, field: Field) -> Iterator[str]:
    """Parts of the step that multiply, by their FLOPs per byte and what they achieve, with their names below."""
    seconds, flops, moved = (by.get("part", {}) for by in (plan.seconds_by, plan.flops_by, plan.bytes_by))
    parts = [(flops[name] / moved[name], flops[name] / seconds[name], name) for name in flops if seconds.get(name)]
    found = sorted((part for part in parts if field.holds(*part[:2])), reverse=True)
    if not found:
        return
    lowest = max(field.y(rate) for _, rate, _ in found)
    said = [f"{name}: {values.prefixed(rate, 'FLOP/s')}" for _, rate, name in found]
    end = min(field.x(found[0][0]) + 60, field.right - LETTER_WIDTH * max(map(len, said)))
    for row, (intensity, rate, _) in enumerate(found):  # from the right, so that no line crosses another
        x, y, below = field.x(intensity), field.y(rate), lowest + 60 + 22 * row
        yield svg.polyline([(x, y), (end - 6, below - 4)], "leader")
        yield svg.circle(x, y, 5, "point")
        yield svg.text(end, below, said[row], "start")


class Field:
    """A plane with two logarithmic axes: FLOPs per byte to the right, FLOP/s upwards."""

    left, right, top, bottom = 110.0, WIDTH - 30.0, 14.0, 360.0

    def __init__(self, x0: float, x1: float, y0: float, y1: float):
        self.span = (log10(x0), log10(x1), log10(y0), log10(y1))

    def x(self, value: float) -> float:
        """Position of an intensity, from the left."""
        x0, x1, *_ = self.span
        return self.left + (log10(value) - x0) / (x1 - x0) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Position of a rate, from the top."""
        *_, y0, y1 = self.span
        return self.bottom - (log10(value) - y0) / (y1 - y0) * (self.bottom - self.top)

    def holds(self, x: float, y: float) -> bool:
        """Returns whether a point is on the plane."""
        x0, x1, y0, y1 = (10.0**edge for edge in self.span)
        return x0 <= x <= x1 and y0 <= y <= y1

    def grid(self) -> Iterator[str]:
        """Lines and figures at powers of ten, and what the axes are."""
        x0, x1, y0, y1 = self.span
        for power in _powers(x0, x1):
            x = self.x(10.0**power)
            yield svg.line(x, self.top, x, self.bottom, "grid")
            yield svg.text(x, self.bottom + 17, f"{10.0**power:,.0f}", "middle")
        for power in _powers(y0, y1):
            y = self.y(10.0**power)
            yield svg.line(self.left, y, self.right, y, "grid")
            yield svg.text(self.left - 8, y + 4, values.prefixed(10.0**power, "FLOP/s"), "end")
        middle = (self.left + self.right) / 2
        yield svg.text(middle, self.bottom + 38, "FLOPs for each byte read or written in memory", "middle")


def _powers(low: float, high: float) -> range:
    return range(-int(-low // 1), int(high // 1) + 1)


def _roof(field: Field, peak: float, bandwidth: float, style: str) -> list[str]:
    """The slope of a bandwidth and the level of a peak."""
    x0, x1, y0, _ = (10.0**edge for edge in field.span)
    start = max(x0, y0 / bandwidth)
    points = [(start, start * bandwidth), (peak / bandwidth, peak), (x1, peak)]
    return [svg.polyline(((field.x(x), field.y(y)) for x, y in points), style)]


def _ticks(at: Callable[[float], float], end: float, unit: values.Unit, y: float) -> Iterator[str]:
    """Round figures of an axis below `y`."""
    step = svg.tick_step(end / unit.factor / 6)
    value = 0.0
    while value * unit.factor <= end:
        x = at(value * unit.factor)
        yield svg.line(x, y, x, y + 5, "axis")
        yield svg.text(
            x, y + 19, f"{value:,.6g}" + (f" {unit.name}" if value == 0 else ""), "middle" if value else "start"
        )
        value += step
