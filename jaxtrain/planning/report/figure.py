"""Plot of a plan by matplotlib, for notebooks."""

from __future__ import annotations

from jaxtrain.io.figure import Plot, draw, new_figure
from jaxtrain.planning.report import values
from jaxtrain.planning.report.page import COLOURS
from jaxtrain.planning.result import Plan


@draw.register
def plan_figure(plan: Plan) -> Plot:
    """Draws the memory of a device by kind against what is usable, and the time of a step by part."""
    memory = [(name, size, kind) for kind, name, size in values.memory_rows(plan)]
    parts = [(part.name, part.seconds, part.group) for part in values.time_parts(plan)]
    figure, (top, bottom) = new_figure([1 + len(memory), 1 + len(parts)], (8, 2 + 0.3 * len(memory + parts)), False)
    for axes, rows, unit, title in (
        (top, memory, values.byte_unit([plan.needs, plan.usable or 0]), "memory of a device"),
        (bottom, parts, values.time_unit([plan.step_seconds or 0.0]), "time of a step"),
    ):
        names, sizes = [name for name, *_ in rows], [size for _, size, _ in rows]
        bars = axes.barh(names, sizes, color=[COLOURS[group][0] for *_, group in rows])
        axes.bar_label(bars, [unit(size) for size in sizes], padding=4, fontsize=9)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.set_title(title if rows else f"{title}: unknown", loc="left", fontsize=11)
    return Plot(figure)
