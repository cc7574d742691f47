"""Comparison of two plans, for example of two layouts or targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from jaxtrain.planning.report import values
from jaxtrain.planning.report.terminal import plain_table
from jaxtrain.planning.result import Plan

HIGHER_IS_BETTER = ("tokens/s", "share")  # units
TOTAL = "total"
MAX_PERCENT = 10  # times as much, above which a factor is shown instead of a percentage
SMALL = 1e-3  # of a section's largest figure; smaller ones are left out on a terminal


@dataclass(frozen=True)
class DiffRow:
    """One figure of both plans.

    Args:
        section: `step`, `memory`, `communication, bytes sent`, `communication, waiting`, `time` or `FLOPs`.
        unit: `bytes`, `seconds`, `tokens/s`, `share`, `days`, `device-hours` or `FLOP`.
        a, b: figures of the plans; None if unknown.
    """

    section: str
    name: str
    unit: str
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """Difference b - a."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def relative(self) -> float | None:
        """Change as a share of `a`; None if that is 0."""
        return None if self.change is None or not self.a else self.change / self.a

    @property
    def is_better(self) -> bool:
        """True if `b` is the better one."""
        return self.change is not None and (self.change > 0) == (self.unit in HIGHER_IS_BETTER)


def rows(a: Plan, b: Plan) -> list[DiffRow]:
    """Lists every figure that one of the plans has."""
    figures = [*_step(a, b), *_memory(a, b), *_communication(a, b), *_time(a, b), *_flops(a, b)]
    return [row for row in figures if row.a or row.b]


def _step(a: Plan, b: Plan) -> Iterator[DiffRow]:
    def per_device(plan: Plan) -> float | None:
        return None if plan.tokens_per_second is None else plan.tokens_per_second / max(1, plan.devices)

    yield DiffRow("step", "step time", "seconds", a.step_seconds, b.step_seconds)
    yield DiffRow("step", "tokens/s", "tokens/s", a.tokens_per_second, b.tokens_per_second)
    if a.devices != b.devices:
        yield DiffRow("step", "tokens/s a device", "tokens/s", per_device(a), per_device(b))
    together = (plan.islands and plan.islands.own.tokens_per_second for plan in (a, b))
    yield DiffRow("step", "tokens/s of all islands", "tokens/s", *together)
    yield DiffRow("step", "MFU", "share", a.mfu, b.mfu)
    yield DiffRow("step", "HFU", "share", a.hfu, b.hfu)
    yield DiffRow("step", "run", "days", a.days, b.days)
    yield DiffRow("step", "device-hours", "device-hours", a.device_hours, b.device_hours)


def _memory(a: Plan, b: Plan) -> Iterator[DiffRow]:
    for kind, name in {**values.MEMORY, "host": "offloaded to the host"}.items():
        sizes = (plan.memory.get(kind, 0) if plan.memory else None for plan in (a, b))
        yield DiffRow("memory", name, "bytes", *sizes)
    yield DiffRow("memory", TOTAL, "bytes", a.needs or None, b.needs or None)


def _communication(a: Plan, b: Plan) -> Iterator[DiffRow]:
    section, plans = "communication, bytes sent", (a, b)
    sent = [
        _sum((f"{row.axes} {row.op}", row.bytes) for row in plan.traffic) if plan.memory else None for plan in plans
    ]  # fmt: skip
    yield from _table_rows(section, "bytes", *sent)
    yield DiffRow(section, TOTAL, "bytes", *(plan.wire_bytes if plan.memory else None for plan in plans))
    waits = [
        None if plan.exposed_seconds is None else _sum((row.axes, row.exposed) for row in plan.traffic)
        for plan in plans
    ]  # fmt: skip
    yield from _table_rows("communication, waiting", "seconds", *waits)


def _sum(figures: Iterable[tuple[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, figure in figures:
        out[name] = out.get(name, 0.0) + figure
    return out


def _table_rows(section: str, unit: str, a: dict[str, float] | None, b: dict[str, float] | None) -> Iterator[DiffRow]:
    """Rows for the keys of both tables, the largest figure first; a table is None if its figures are unknown."""
    tables = [table or {} for table in (a, b)]
    names = dict.fromkeys(name for table in tables for name in table)
    for name in sorted(names, key=lambda name: -max(table.get(name, 0.0) for table in tables)):
        figures = (None if table is None else table.get(name, 0.0) for table in (a, b))
        yield DiffRow(section, values.KINDS.get(name, name) if section == "time" else name, unit, *figures)


def _time(a: Plan, b: Plan) -> Iterator[DiffRow]:
    plans = (a, b)
    yield from _table_rows("time", "seconds", *(p.seconds_by.get("kind", {}) if p.seconds_by else None for p in plans))
    yield DiffRow("time", "waiting for communication", "seconds", a.exposed_seconds, b.exposed_seconds)
    bubbles = (plan.bubble_seconds if plan.seconds_by else None for plan in plans)
    yield DiffRow("time", "pipeline bubble", "seconds", *bubbles)


def _flops(a: Plan, b: Plan) -> Iterator[DiffRow]:
    for name in ("model", "hardware", "compiled"):
        yield DiffRow("FLOPs", name, "FLOP", getattr(a, f"flops_{name}"), getattr(b, f"flops_{name}"))


def as_dict(a: Plan, b: Plan, titles: tuple[str, str]) -> dict[str, Any]:
    """Converts the comparison for JSON: the two plans, and the rows with `change` and `relative`."""
    sides = [
        {"title": title, "target": plan.target, "layout": plan.layout, "fits": plan.fits, "compiled": plan.compiled,
         "reason": plan.reason, "pods": list(plan.pods)}
        for plan, title in zip((a, b), titles)
    ]  # fmt: skip
    figures = [{**asdict(row), "change": row.change, "relative": row.relative} for row in rows(a, b)]
    return {"a": sides[0], "b": sides[1], "rows": figures}


def report(a: Plan, b: Plan, titles: tuple[str, str]) -> RenderableType:
    """Builds the comparison for a terminal of 80 columns or more, without figures that are very small in both."""
    head: list[RenderableType] = []
    for letter, plan, title in zip("AB", (a, b), titles):
        head.append(Text.assemble((f"{letter}  {title}", "bold"), f"  on {plan.target}, {plan.layout}"))
        lines = (": ".join(values.verdict(plan)), values.pods_text(plan))
        head += [Text(f"   {line}", style="dim") for line in lines if line]
    columns = ("A", "B", "change", "%")
    table = plain_table("", *columns, right=columns)
    sections: dict[str, list[DiffRow]] = {}
    for row in rows(a, b):
        sections.setdefault(row.section, []).append(row)
    for section, inside in sections.items():
        names = dict.fromkeys(row.unit for row in inside)
        units = {name: _unit(name, [row for row in inside if row.unit == name]) for name in names}
        has_one_unit = len(units) == 1
        title = f"{section}, {units[inside[0].unit].name}" if has_one_unit else section
        table.add_row(Text(title, style="bold"))
        smallest = SMALL * max(max(row.a or 0.0, row.b or 0.0) for row in inside) if has_one_unit else 0.0
        for row in inside:
            if max(row.a or 0.0, row.b or 0.0) >= smallest:
                table.add_row(*_cells(row, units[row.unit], has_one_unit))
    return Group(*head, Text(), table)


def _cells(row: DiffRow, unit: values.Unit, is_bare: bool) -> list[Text]:
    """Cells of a row; `is_bare`: figures without their unit."""
    format_figure = unit.number if is_bare else unit
    figures = [Text("unknown" if value is None else format_figure(value).strip()) for value in (row.a, row.b)]
    change, style = row.change, "green" if row.is_better else "red"
    if not change:
        return [Text(f"  {row.name}"), *figures, Text("-" if change is None else "same"), Text("")]
    share = row.relative
    relative = "new" if share is None else f"{share:+.1%}" if share < MAX_PERCENT else f"x {1 + share:,.0f}"
    signed = f"{change / unit.factor:+,.{unit.digits}f}"
    return [Text(f"  {row.name}"), *figures, Text(signed, style), Text(relative, style)]


def _unit(name: str, inside: list[DiffRow]) -> values.Unit:
    figures = [value for row in inside for value in (row.a, row.b) if value is not None]
    if name == "bytes":
        return values.byte_unit(figures)
    if name == "seconds":
        return values.time_unit(figures)
    if name == "FLOP":
        prefix, factor = next((one for one in values.PREFIXES if max(figures, default=0.0) >= one[1]), ("", 1.0))
        return values.Unit(f"{prefix}FLOP", factor, 1)
    if name == "days" and max(figures, default=1.0) < 1:
        return values.Unit("hours", 1 / 24)
    return {
        "share": values.Unit("%", 0.01, 1), "tokens/s": values.Unit("", 1.0, 0), "days": values.Unit("days", 1.0),
    }.get(name, values.Unit("", 1.0, 0))  # fmt: skip
