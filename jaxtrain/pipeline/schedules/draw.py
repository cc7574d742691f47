"""Tables for the eye: in the terminal, and as a chart in a file. No JAX; matplotlib and rich are imported when used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.pipeline.schedules.cost import Costs, ScheduleCost, action_costs, price, start_times, tick_times
from jaxtrain.pipeline.schedules.table import Action, Step, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

# By action, for the first chunk and for the later ones; readable in grey too, F light to W dark.
COLORS = {
    Action.F: ("#8ecae6", "#c3e3f2"),
    Action.B: ("#ffb703", "#ffdb80"),
    Action.W: ("#6a994e", "#a7c795"),
    Action.BW: ("#ffb703", "#ffdb80"),
}
MEANING = {
    Action.F: "forward",
    Action.B: "input gradient",
    Action.W: "weight gradient",
    Action.BW: "backward",
}
BANDS = 6  # of ticks that a terminal shows, one below the other
NUMBERED_TICKS = 130  # a chart with more has no room for the microbatches' numbers


def grid(table: Table, width: int) -> list[Text]:
    """Lines of the table for a terminal of `width` columns, folded where it is wider.

    A cell is an action's letter and its microbatch; a prime, or a number, tells the chunk.
    """
    from rich.text import Text

    cell = max(len(_label(table, step)) for _, _, step in table.steps()) + 1
    name = len(f"stage {table.stages - 1}")
    fit = max(1, (width - name - 1) // cell)
    steps = {(tick, stage): step for tick, stage, step in table.steps()}
    lines = []
    for first in range(0, min(table.ticks, BANDS * fit), fit):
        ticks = range(first, min(first + fit, table.ticks))
        marks = "".join(f"{tick:<{cell}}" if tick % 5 == 0 else " " * cell for tick in ticks)
        lines.append(Text(f"{'tick':<{name}} {marks}".rstrip(), style="dim"))
        for stage in range(table.stages):
            line = Text(f"stage {stage}".ljust(name + 1))
            for tick in ticks:
                step = steps.get((tick, stage))
                text = _label(table, step) if step else "·"
                style = f"black on {_color(step)}" if step else "dim"
                line.append(text.ljust(cell - 1), style).append(" ")
            line.rstrip()
            lines.append(line)
    if table.ticks > BANDS * fit:
        lines.append(Text(f"... and {table.ticks - BANDS * fit} more ticks; the chart has them all", style="dim"))
    return lines


def summary(table: Table, figures: ScheduleCost, costs: Costs) -> list[str]:
    """Describes a table and its cost, in lines."""
    size = f"{table.stages} stages{f' of {table.chunks} chunks' if table.chunks > 1 else ''}"
    times = {
        "lockstep": (figures.lockstep, figures.lockstep_bubble, "all wait for the tick's costliest action"),
        "asynchronous": (figures.span, figures.bubble, "each stage goes on as soon as it can"),
        "longest stage": (figures.longest, figures.longest_bubble, "from its own first action to its last"),
    }
    return [
        f"{table.name}: {size}, {table.microbatches} microbatches: {table.ticks} ticks, {figures.sends} sends",
        f"{_priced(costs):<16}  {'time':>6}  bubble",
        *(f"  {name:<14}  {time:>6.4g}  {bubble:>6.1%}  {note}" for name, (time, bubble, note) in times.items()),
        f"activations kept at most: {figures.peak.max():.4g} microbatches of a whole stage",
    ]


def compare(tables: Sequence[Table], costs: Costs) -> RichTable:
    """Compares schedules side by side; bold is the least time in lockstep."""
    from rich.table import Table as RichTable

    rows = RichTable(box=None, pad_edge=False, header_style="bold")
    rows.add_column(f"{_priced(costs)}\nschedule", no_wrap=True)
    times = ("lockstep\ntime", "\nbubble", "async\ntime", "\nbubble", "longest\nbubble")
    for name in ("\nticks", *times, "most\nkept", "\nsends"):
        rows.add_column(name, justify="right", no_wrap=True)
    prices = [price(table, costs) for table in tables]
    least = min(prices, key=lambda figures: figures.lockstep)
    for figures in prices:
        times = (
            f"{figures.lockstep:.4g}",
            f"{figures.lockstep_bubble:.1%}",
            f"{figures.span:.4g}",
            f"{figures.bubble:.1%}",
        )
        rest = f"{figures.longest_bubble:.1%}", f"{figures.peak.max():.3g}", str(figures.sends)
        rows.add_row(figures.name, str(figures.ticks), *times, *rest, style="bold" if figures is least else None)
    return rows


def chart(tables: Sequence[Table], costs: Costs, path: str | Path) -> Path:
    """Draws Gantt charts into an .svg or .png file.

    One table is drawn in lockstep, and below asynchronously where that differs; several are drawn in lockstep.

    Raises:
        UserError: another kind of file.
        OSError: it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"{path}: expected a file name that ends with .svg or .png")
    panels = [_lockstep(table, costs, named=len(tables) > 1) for table in tables]
    if len(tables) == 1:
        panels += _asynchronous(tables[0], costs)
    size = min(24, max(8.5, 0.24 * max(table.ticks for table in tables)))
    height = 1.6 + sum(0.45 + 0.36 * table.stages for table, *_ in panels)
    with rc_context({"svg.fonttype": "path", "font.size": 9}):
        figure = Figure(figsize=(size, height), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(_title(tables, costs), x=0.01, ha="left", fontsize=11)
        ratios = [1 + table.stages for table, *_ in panels]
        rows = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=ratios)[:, 0]
        for axes, (table, title, start, _) in zip(rows, panels):
            _draw_panel(axes, table, costs, start)
            axes.set_title(title, loc="left", fontsize=9.5)
        rows[0].set_xlim(0, max(time for *_, time in panels))
        rows[-1].set_xlabel("time, in the unit of the costs", loc="left")
        _draw_legend(figure, tables)
        figure.savefig(path, dpi=150)
    return path


Panel = tuple[Table, str, np.ndarray, float]  # with title, start times [ticks, stages] and end


def _lockstep(table: Table, costs: Costs, named: bool) -> Panel:
    figures, durations = price(table, costs), tick_times(table, costs)
    start = np.broadcast_to((np.cumsum(durations) - durations)[:, None], table.action.shape)
    title = f"lockstep: time {figures.lockstep:.4g}, bubble {figures.lockstep_bubble:.1%}"
    if named:
        title = f"{table.name}, {title}, {table.ticks} ticks, {figures.peak.max():.3g} activations at most"
    return table, title, start, figures.lockstep


def _asynchronous(table: Table, costs: Costs) -> list[Panel]:
    """One panel, or none where stages that go on as soon as they can are as slow as in lockstep."""
    figures = price(table, costs)
    if np.isclose(figures.span, figures.lockstep):
        return []
    title = f"asynchronous: time {figures.span:.4g}, bubble {figures.bubble:.1%}"
    return [(table, title, start_times(table, costs), figures.span)]


def _title(tables: Sequence[Table], costs: Costs) -> str:
    table = tables[0]
    size = f"{table.stages} stages, {table.microbatches} microbatches"
    if len(tables) > 1:
        return f"{size} ({_priced(costs)})"
    peak = f"{price(table, costs).peak.max():.3g} activations at most"
    return f"{table.name}: {size}, {table.ticks} ticks, {peak} ({_priced(costs)})"


def _priced(costs: Costs) -> str:
    return f"F {costs.forward:g}, B {costs.backward:g}, W {costs.weight:g}"


def _draw_panel(axes: Any, table: Table, costs: Costs, start: np.ndarray) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    durations = action_costs(table, costs)
    boxes, colors = [], []
    for tick, stage, step in table.steps():
        begin, time = start[tick, stage], durations[step.action]
        boxes.append(Rectangle((begin, stage - 0.42), time, 0.84))
        colors.append(_color(step))
        if table.ticks <= NUMBERED_TICKS and time:
            style = "italic" if step.chunk else "normal"
            axes.text(begin + time / 2, stage, str(step.microbatch), ha="center", va="center", style=style, fontsize=8)
    axes.add_collection(PatchCollection(boxes, facecolor=colors, edgecolor="#404040", linewidth=0.5))
    axes.set_ylim(table.stages - 0.5, -0.5)
    axes.set_yticks(range(table.stages), [f"stage {stage}" for stage in range(table.stages)])
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor("#f1f1f1")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw_legend(figure: Any, tables: Sequence[Table]) -> None:
    from matplotlib.patches import Patch

    used = [action for action in MEANING if any((table.action == action).any() for table in tables)]
    meaning = dict(MEANING)
    if Action.B in used and Action.BW in used:  # one colour
        used.remove(Action.BW)
        meaning[Action.B] = "backward, or input gradient"
    faces = [(COLORS[action][0], meaning[action]) for action in used]
    if any(table.chunks > 1 for table in tables):
        faces.append((COLORS[used[0]][1], "pale, italic: later chunk"))
    handles = [
        Patch(facecolor=color, edgecolor="#404040", linewidth=0.5, label=label)
        for color, label in (*faces, ("#f1f1f1", "waits"))
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8.5)


def _color(step: Step) -> str:
    return COLORS[step.action][min(step.chunk, 1)]


def _label(table: Table, step: Step) -> str:
    """`F3`, `B3`, `W3`; with `'` for the second chunk of two, with its number where there are more."""
    letter = table.letter(step.action)
    if table.chunks <= 2:
        return f"{letter}{step.microbatch}{chr(39) * step.chunk}"
    return f"{letter}{step.microbatch}.{step.chunk}"
