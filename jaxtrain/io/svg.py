"""Elements of plots as SVG text, coloured by the classes of a style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10

WIDTH = 860
LETTER = 7.4  # widths of a letter at the size of labels, about


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** int(log10(rough) // 1)
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def cut(text: str, width: float) -> str:
    """The text, shortened to so many units."""
    fits = int(width / LETTER)
    return text if len(text) <= fits else f"{text[: fits - 1]}…"


def picture(height: float, parts: Sequence[str], what: str) -> str:
    """The whole, `WIDTH` wide; `what` is said to those who do not see it."""
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(what)}">\n{body}\n</svg>'


def rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    """A bar; `title` is shown where the mouse rests."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
    return f'<rect class="{escape(style)}" {place}>{inside}</rect>'


def line(x0: float, y0: float, x1: float, y1: float, style: str) -> str:
    """Draws a line from one point to another."""
    return f'<line class="{style}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def text(x: float, y: float, text: str, anchor: str) -> str:
    """A label; `anchor` is start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
