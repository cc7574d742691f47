"""Drawings of tables: a grid in the terminal and a chart in a file. matplotlib and rich are imported when used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.io.figure import Plot
from jaxtrain.pipeline.schedules.cost import Costs, ScheduleCost, action_costs, schedule_cost, start_times, tick_times
from jaxtrain.pipeline.schedules.table import Action, Table, Task

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

# By action, for the first chunk and for later ones. Also readable in grayscale, from light (F) to dark (W).
COLORS = {
    Action.F: ("#8ecae6", "#c3e3f2"),
    Action.B: ("#ffb703", "#ffdb80"),
    Action.W: ("#6a994e", "#a7c795"),
    Action.BW: ("#ffb703", "#ffdb80"),
}
LABELS = {
    Action.F: "forward", Action.B: "input gradient", Action.W: "weight gradient", Action.BW: "backward",
}  # fmt: skip
MAX_BANDS = 6  # bands of ticks that a terminal shows, one below the other
MAX_NUMBERED_TICKS = 130  # longer charts have no space for the numbers of the microbatches


def text_grid(table: Table, width: int) -> list[Text]:
    """Returns the table as lines for a terminal of `width` columns, folded if it is wider.

    A cell is the letter of the action and the microbatch; a prime or a number marks the chunk.
    """
    from rich.text import Text

    tasks = {(tick, stage): task for tick, stage, task in table.tasks()}
    cell_width = max(len(_label(table, task)) for task in tasks.values()) + 1
    name_width = len(f"stage {table.stages - 1}")
    band = max(1, (width - name_width - 1) // cell_width)  # ticks of a line
    lines = []
    for first in range(0, min(table.ticks, MAX_BANDS * band), band):
        ticks = range(first, min(first + band, table.ticks))
        marks = "".join(f"{tick:<{cell_width}}" if tick % 5 == 0 else " " * cell_width for tick in ticks)
        lines.append(Text(f"{'tick':<{name_width}} {marks}".rstrip(), style="dim"))
        for stage in range(table.stages):
            line = Text(f"stage {stage}".ljust(name_width + 1))
            for tick in ticks:
                task = tasks.get((tick, stage))
                text = _label(table, task) if task else "·"
                style = f"black on {_color(task)}" if task else "dim"
                line.append(text.ljust(cell_width - 1), style).append(" ")
            line.rstrip()
            lines.append(line)
    if table.ticks > MAX_BANDS * band:
        lines.append(Text(f"... and {table.ticks - MAX_BANDS * band} more ticks; the chart has them all", style="dim"))
    return lines


def cost_lines(table: Table, figures: ScheduleCost, costs: Costs) -> list[str]:
    """Describes a table and its cost, in several lines."""
    size = f"{table.stages} stages{f' of {table.chunks} chunks' if table.chunks > 1 else ''}"
    times = {
        "lockstep": (figures.lockstep, figures.lockstep_bubble, "every tick takes as long as its costliest action"),
        "asynchronous": (figures.makespan, figures.bubble, "each stage starts as early as possible"),
        "longest stage": (figures.longest_stage, figures.longest_bubble, "from its first action to its last"),
    }
    return [
        f"{table.name}: {size}, {table.microbatches} microbatches: {table.ticks} ticks, {figures.sends} sends",
        f"{costs_label(costs):<16}  {'time':>6}  bubble",
        *(f"  {name:<14}  {time:>6.4g}  {bubble:>6.1%}  {note}" for name, (time, bubble, note) in times.items()),
        f"peak activations: {figures.peak.max():.4g} microbatches of a whole stage",
    ]


def comparison(tables: Sequence[Table], costs: Costs) -> RichTable:
    """Returns a table that compares schedules side by side; the least time in lockstep is bold."""
    from rich.table import Table as RichTable

    rows = RichTable(box=None, pad_edge=False, header_style="bold")
    rows.add_column(f"{costs_label(costs)}\nschedule", no_wrap=True)
    times = ("lockstep\ntime", "\nbubble", "async\ntime", "\nbubble", "longest\nbubble")
    for name in ("\nticks", *times, "\npeak", "\nsends"):
        rows.add_column(name, justify="right", no_wrap=True)
    all_figures = [schedule_cost(table, costs) for table in tables]
    fastest = min(all_figures, key=lambda figures: figures.lockstep)
    for figures in all_figures:
        rows.add_row(*figure_cells(figures), style="bold" if figures is fastest else None)
    return rows


def figure_cells(figures: ScheduleCost) -> tuple[str, ...]:
    """Returns name, ticks, time and bubble in lockstep and asynchronously, longest bubble, peak and sends as text."""
    return (
        figures.name, str(figures.ticks), f"{figures.lockstep:.4g}", f"{figures.lockstep_bubble:.1%}",
        f"{figures.makespan:.4g}", f"{figures.bubble:.1%}", f"{figures.longest_bubble:.1%}",
        f"{figures.peak.max():.3g}", str(figures.sends),
    )  # fmt: skip


def save_chart(tables: Sequence[Table], costs: Costs, path: str | Path) -> Path:
    """Writes a `chart` into an .svg or .png file.

    Raises:
        UserError: another kind of file.
        OSError: the file can not be written.
    """
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"{path}: expected a file name that ends with .svg or .png")
    return chart(tables, costs).save(path)


def chart(tables: Sequence[Table], costs: Costs) -> Plot:
    """Draws Gantt charts.

    One table is drawn in lockstep, and below asynchronously if that differs; several are drawn in lockstep.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [_lockstep(table, costs, named=len(tables) > 1) for table in tables]
    if len(tables) == 1:
        panels += _asynchronous(tables[0], costs)
    width = min(24, max(8.5, 0.24 * max(table.ticks for table in tables)))
    height = 1.6 + sum(0.45 + 0.36 * table.stages for table, *_ in panels)
    with rc_context({"svg.fonttype": "path", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
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
    return Plot(figure)


Panel = tuple[Table, str, np.ndarray, float]  # table, title, start times [ticks, stages], end


def _lockstep(table: Table, costs: Costs, named: bool) -> Panel:
    figures, durations = schedule_cost(table, costs), tick_times(table, costs)
    start = np.broadcast_to((np.cumsum(durations) - durations)[:, None], table.action.shape)
    title = f"lockstep: time {figures.lockstep:.4g}, bubble {figures.lockstep_bubble:.1%}"
    if named:
        title = f"{table.name}, {title}, {table.ticks} ticks, {figures.peak.max():.3g} activations at peak"
    return table, title, start, figures.lockstep


def _asynchronous(table: Table, costs: Costs) -> list[Panel]:
    """Returns one panel, or none if asynchronous stages are as slow as in lockstep."""
    figures = schedule_cost(table, costs)
    if np.isclose(figures.makespan, figures.lockstep):
        return []
    title = f"asynchronous: time {figures.makespan:.4g}, bubble {figures.bubble:.1%}"
    return [(table, title, start_times(table, costs), figures.makespan)]


def _title(tables: Sequence[Table], costs: Costs) -> str:
    table = tables[0]
    size = f"{table.stages} stages, {table.microbatches} microbatches"
    if len(tables) > 1:
        return f"{size} ({costs_label(costs)})"
    peak = f"{schedule_cost(table, costs).peak.max():.3g} activations at peak"
    return f"{table.name}: {size}, {table.ticks} ticks, {peak} ({costs_label(costs)})"


def costs_label(costs: Costs) -> str:
    """Returns e.g. `F 1, B 1.5, W 0.5`."""
    return f"F {costs.forward:g}, B {costs.backward:g}, W {costs.weight:g}"


def _draw_panel(axes: Any, table: Table, costs: Costs, start: np.ndarray) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    durations = action_costs(table, costs)
    boxes, colors = [], []
    for tick, stage, task in table.tasks():
        begin, time = start[tick, stage], durations[task.action]
        boxes.append(Rectangle((begin, stage - 0.42), time, 0.84))
        colors.append(_color(task))
        if table.ticks <= MAX_NUMBERED_TICKS and time:
            style = "italic" if task.chunk else "normal"
            axes.text(begin + time / 2, stage, str(task.microbatch), ha="center", va="center", style=style, fontsize=8)
    axes.add_collection(PatchCollection(boxes, facecolor=colors, edgecolor="#404040", linewidth=0.5))
    axes.set_ylim(table.stages - 0.5, -0.5)
    axes.set_yticks(range(table.stages), [f"stage {stage}" for stage in range(table.stages)])
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor("#f1f1f1")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw_legend(figure: Any, tables: Sequence[Table]) -> None:
    from matplotlib.patches import Patch

    used = [action for action in LABELS if any((table.action == action).any() for table in tables)]
    labels = dict(LABELS)
    if Action.B in used and Action.BW in used:  # same color
        used.remove(Action.BW)
        labels[Action.B] = "backward, or input gradient"
    faces = [(COLORS[action][0], labels[action]) for action in used]
    if any(table.chunks > 1 for table in tables):
        faces.append((COLORS[used[0]][1], "pale, italic: later chunk"))
    handles = [
        Patch(facecolor=color, edgecolor="#404040", linewidth=0.5, label=label)
        for color, label in (*faces, ("#f1f1f1", "idle"))
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8.5)


def _color(task: Task) -> str:
    return COLORS[task.action][min(task.chunk, 1)]


def _label(table: Table, task: Task) -> str:
    """Returns `F3`, `B3` or `W3`, with `'` for the second chunk of two, or `.2` for chunk 2 of more."""
    chunk = "'" * task.chunk if table.chunks <= 2 else f".{task.chunk}"
    return f"{table.letter(task.action)}{task.microbatch}{chunk}"
