"""Elements of SVG plots, coloured by the classes of a style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import ceil, floor, log10

WIDTH = 860  # of a drawing
LETTER_WIDTH = 7.4  # approximate width of a letter of labels


def tick_step(minimum: float) -> float:
    """Returns the smallest of 1, 2 and 5 times a power of ten that is at least `minimum`."""
    power = 10.0 ** floor(log10(minimum))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= minimum * 0.999)


def ticks(low: float, high: float, count: int) -> Iterator[float]:
    """Yields the round values from `low` to `high`, about `count` of them."""
    step = tick_step((high - low) / count)
    value = ceil(low / step) * step
    while value <= high:
        yield value
        value += step


def shorten(text: str, width: float) -> str:
    """Shortens a label to a width."""
    letters = int(width / LETTER_WIDTH)
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def drawing(height: float, elements: Sequence[str], label: str) -> str:
    """Returns an SVG image of elements, `WIDTH` wide; screen readers read the label."""
    body = "\n".join(elements)
    size = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">\n{body}\n</svg>'


def rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    """Returns a bar of the class `style`; its title is shown under the mouse."""
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
    return f'<rect class="{escape(style)}" {box}>{tooltip}</rect>'


def line(x0: float, y0: float, x1: float, y1: float, style: str) -> str:
    """Returns a line of the class `style`."""
    return f'<line class="{style}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def text(x: float, y: float, text: str, anchor: str) -> str:
    """Returns a label; `anchor` is start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def polyline(points: Iterable[tuple[float, float]], style: str) -> str:
    """Returns a line through points, of the class `style`."""
    return f'<polyline class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def circle(x: float, y: float, radius: float, style: str) -> str:
    """Returns a dot of the class `style`."""
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>'
