"""Drawings by matplotlib, which notebooks show and files hold, and results that have them.

Nothing depends on matplotlib's global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

TEXT_WIDTH = 100  # columns of the text of a result


class Plot:
    """A drawing. A notebook shows it.

    Args:
        figure: matplotlib's figure.
    """

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def save(self, path: str | Path) -> Path:
        """Writes a PNG, SVG or PDF file, by the end of its name."""
        self.figure.savefig(path, dpi=150)
        return Path(path)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def new_figure(heights: Sequence[float], size: tuple[float, float], share_x: bool = True) -> tuple[Any, list[Any]]:
    """Returns a figure and its axes, one below the other.

    Args:
        heights: relative heights of the axes.
        size: width and height in inches.
        share_x: give all the same horizontal axis.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=share_x, height_ratios=heights, squeeze=False)[:, 0]
    for each in axes:
        each.grid(alpha=0.25, linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)
        each.margins(x=0.01)
    return figure, list(axes)


class Displayed:
    """A result that notebooks and terminals show, instead of its fields.

    Modules that report it register in `as_html`, `as_text` and `draw` how.
    """

    def plot(self, *names: str) -> Plot:
        """Draws the result; `names`: metrics of a run, default: its losses and learning rate."""
        return draw(self, *names)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __repr__(self) -> str:
        return as_text(self)


@singledispatch
def as_html(result: Any) -> str:
    """Returns HTML of a result for notebooks."""
    raise TypeError(f"{type(result).__name__} has no HTML")


@singledispatch
def as_text(result: Any) -> str:
    """Returns lines of text of a result for terminals."""
    return object.__repr__(result)


def plain_text(*parts: Any) -> str:
    """Returns texts and tables of rich as lines without colours."""
    from rich.text import Text

    from jaxtrain.io.terminal import plain_console

    buffer = io.StringIO()  # not a notebook's output, which rich looks for
    console = plain_console(file=buffer, width=TEXT_WIDTH, color_system=None, force_jupyter=False)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part, highlight=False, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


@singledispatch
def draw(result: Any, *names: str) -> Plot:
    """Draws a result."""
    raise TypeError(f"{type(result).__name__} has no plot")
