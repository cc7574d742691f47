"""Pipeline schedules from Python: their tables, cost and drawings. Does not import JAX."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.io import html
from jaxtrain.io.figure import Displayed, Plot, as_html, draw
from jaxtrain.pipeline.schedules import draw as drawings
from jaxtrain.pipeline.schedules.cost import Costs, ScheduleCost, schedule_cost
from jaxtrain.pipeline.schedules.files import is_file, load_table
from jaxtrain.pipeline.schedules.shipped import SCHEDULES, shipped_table
from jaxtrain.pipeline.schedules.table import Table

STAGES, MICROBATCHES = 4, 8


@dataclass(frozen=True)
class ScheduleReport(Displayed):
    """One pipeline schedule, or several side by side.

    Attributes:
        tables: who does which forward, backward or weight gradient at which tick.
        costs: times of a microbatch that the figures assume.
    """

    tables: tuple[Table, ...]
    costs: Costs

    @property
    def figures(self) -> list[ScheduleCost]:
        """Time, bubble, activations and messages of each table."""
        return [schedule_cost(table, self.costs) for table in self.tables]

    def save(self, path: str | Path) -> Path:
        """Writes the chart into an .svg or .png file."""
        return drawings.save_chart(self.tables, self.costs, path)


def schedule(
    name: str, stages: int | None = None, microbatches: int | None = None, chunks: int | None = None, *,
    costs: tuple[float, float, float] = (1, 1, 1),
) -> ScheduleReport:  # fmt: skip
    """Prices and draws a pipeline schedule.

    Args:
        name: of a shipped schedule, such as `zb_h1`, or a .csv or .yaml table of your own.
        stages: number of pipeline stages; default: 4, or those of the file.
        microbatches: microbatches of a step; default: 8, or those of the file.
        chunks: chunks of the model that each stage holds; default: the schedule's.
        costs: times of the forward, input gradient and weight gradient of one microbatch on a stage.

    Raises:
        UserError: unknown schedule, a table that can not run, or costs that are not above 0.
    """
    return ScheduleReport((_table(name, stages, microbatches, chunks),), _checked(costs))


def compare_schedules(
    name: str | None = None, stages: int | None = None, microbatches: int | None = None, chunks: int | None = None, *,
    costs: tuple[float, float, float] = (1, 1, 1),
) -> ScheduleReport:  # fmt: skip
    """Compares all shipped pipeline schedules of one size, and a table of your own.

    Args:
        name: a .csv or .yaml table, which then says the size.
        stages: see `schedule`.
        microbatches: see `schedule`.
        chunks: see `schedule`.
        costs: see `schedule`.

    Raises:
        UserError: see `schedule`.
    """
    first = None if name is None else _table(name, stages, microbatches, chunks)
    own = () if first is None or name is None or not is_file(name) else (first,)
    if own:
        stages, microbatches = own[0].stages, own[0].microbatches
    size = (STAGES if stages is None else stages, MICROBATCHES if microbatches is None else microbatches)
    shipped = (shipped_table(name, *size, None if kind.chunks else chunks) for name, kind in SCHEDULES.items())
    return ScheduleReport((*own, *shipped), _checked(costs))


def _table(name: str, stages: int | None, microbatches: int | None, chunks: int | None) -> Table:
    if not is_file(name):
        stages, microbatches = (
            STAGES if stages is None else stages,
            MICROBATCHES if microbatches is None else microbatches,
        )
    return load_table(name, stages, microbatches, chunks)


def _checked(costs: tuple[float, float, float]) -> Costs:
    if len(costs) != 3 or not all(0 < cost < float("inf") for cost in costs):
        raise UserError(f"schedule: costs are {costs}; expected three numbers above 0, such as (1, 1.2, 0.8)")
    return Costs(*costs)


@as_html.register
def _html(report: ScheduleReport) -> str:
    """Returns the figures of each schedule for notebooks."""
    times = ("time in lockstep", "bubble", "time asynchronously", "bubble", "longest bubble")
    titles = ("schedule", "ticks", *times, "peak of activations", "sends")
    rows = [drawings.figure_cells(figures) for figures in report.figures]
    return html.table(titles, rows, drawings.costs_label(report.costs))


@draw.register
def _drawing(report: ScheduleReport, *names: str) -> Plot:
    """Draws the tables as Gantt charts."""
    del names
    return drawings.chart(report.tables, report.costs)
