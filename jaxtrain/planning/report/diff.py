"""Two plans side by side: what swapping a layout, a target or any key changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxtrain.planning.report import values as view
from jaxtrain.planning.result import Plan, Traffic

BETTER_HIGHER = ("tokens/s", "share")  # units of which more is better
ALL = "in all"
MANY = 10  # times as much, from which on no percentage is given
SMALL = 1e-3  # of a section's largest figure: a terminal does not show less


@dataclass(frozen=True)
class DiffRow:
    """One figure of both plans.

    Args:
        section: `step`, `memory`, `communication, bytes sent`, `communication, waiting`, `time` or `FLOPs`.
        unit: `bytes`, `seconds`, `tokens/s`, `share`, `days`, `device-hours` or `FLOP`.
        a, b: None where it is not known.
    """

    section: str
    name: str
    unit: str
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """b - a."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def relative(self) -> float | None:
        """The change as a share of `a`; None where that is 0."""
        return None if self.change is None or not self.a else self.change / self.a

    @property
    def is_better(self) -> bool:
        """True if `b` is the better one."""
        return self.change is not None and (self.change > 0) == (self.unit in BETTER_HIGHER)


def rows(a: Plan, b: Plan) -> list[DiffRow]:
    """Every figure that one of the plans has."""
    found = [*_step(a, b), *_memory(a, b), *_communication(a, b), *_time(a, b), *_flops(a, b)]
    return [row for row in found if row.a or row.b]


def _step(a: Plan, b: Plan) -> Iterator[DiffRow]:
    figures: dict[str, tuple[str, Callable[[Plan], float | None]]] = {
        "step time": ("seconds", lambda plan: plan.step_seconds),
        "tokens/s": ("tokens/s", lambda plan: plan.tokens_per_second),
        "tokens/s a device": ("tokens/s", lambda plan: _per_device(plan)),
        "MFU": ("share", lambda plan: plan.mfu),
        "HFU": ("share", lambda plan: plan.hfu),
        "run": ("days", lambda plan: plan.days),
        "device-hours": ("device-hours", lambda plan: plan.device_hours),
    }
    for name, (unit, figure) in figures.items():
        if name != "tokens/s a device" or a.devices != b.devices:
            yield DiffRow("step", name, unit, figure(a), figure(b))


def _per_device(plan: Plan) -> float | None:
    return None if plan.tokens_per_second is None else plan.tokens_per_second / max(1, plan.devices)


def _memory(a: Plan, b: Plan) -> Iterator[DiffRow]:
    for kind, name in {**view.MEMORY, "host": "offloaded to the host"}.items():
        yield DiffRow("memory", name, "bytes", *(_if(plan.memory, plan.memory.get(kind, 0)) for plan in (a, b)))
    yield DiffRow("memory", ALL, "bytes", a.needs or None, b.needs or None)


def _communication(a: Plan, b: Plan) -> Iterator[DiffRow]:
    plans = (a, b)
    sent = [_sums(plan, lambda row: f"{row.axes} {row.op}", lambda row: row.bytes) for plan in plans]
    for name in _names(sent):
        known = (_if(plan.memory, one.get(name, 0)) for plan, one in zip(plans, sent))
        yield DiffRow("communication, bytes sent", name, "bytes", *known)
    yield DiffRow("communication, bytes sent", ALL, "bytes", *(_if(p.memory, p.wire_bytes) for p in plans))
    waits = [_sums(plan, lambda row: row.axes, lambda row: row.exposed) for plan in plans]
    for name in _names(waits):
        known = (_if(p.exposed_seconds is not None, one.get(name, 0.0)) for p, one in zip(plans, waits))
        yield DiffRow("communication, waiting", name, "seconds", *known)


def _if(known: object, figure: float) -> float | None:
    return figure if known else None


def _sums(plan: Plan, name: Callable[[Traffic], str], figure: Callable[[Traffic], float]) -> dict[str, float]:
    out: dict[str, float] = {}
    for row in plan.traffic:
        out[name(row)] = out.get(name(row), 0.0) + figure(row)
    return out


def _names(tables: list[dict[str, float]]) -> list[str]:
    """Keys of both, the largest figure first."""
    names = dict.fromkeys(name for table in tables for name in table)
    return sorted(names, key=lambda name: -max(table.get(name, 0.0) for table in tables))


def _time(a: Plan, b: Plan) -> Iterator[DiffRow]:
    plans = (a, b)
    kinds = [plan.seconds_by.get("kind", {}) for plan in plans]
    for kind in _names(kinds):
        known = (_if(plan.seconds_by, one.get(kind, 0.0)) for plan, one in zip(plans, kinds))
        yield DiffRow("time", view.KINDS.get(kind, kind), "seconds", *known)
    yield DiffRow("time", "waiting for communication", "seconds", a.exposed_seconds, b.exposed_seconds)
    yield DiffRow("time", "pipeline bubble", "seconds", *(_if(plan.seconds_by, plan.bubble_seconds) for plan in plans))


def _flops(a: Plan, b: Plan) -> Iterator[DiffRow]:
    for name in ("model", "hardware", "compiled"):
        yield DiffRow("FLOPs", name, "FLOP", getattr(a, f"flops_{name}"), getattr(b, f"flops_{name}"))


def as_dict(a: Plan, b: Plan, titles: tuple[str, str]) -> dict[str, Any]:
    """Returns the comparison for JSON: what was compared, and the rows with `change` and `relative`."""
    sides = [
        {"title": title, "target": plan.target, "layout": plan.layout, "fits": plan.fits, "compiled": plan.compiled,
         "reason": plan.reason, "pods": list(plan.pods)}
        for plan, title in zip((a, b), titles)
    ]  # fmt: skip
    figures = [
        {"section": row.section, "name": row.name, "unit": row.unit, "a": row.a, "b": row.b, "change": row.change,
         "relative": row.relative}
        for row in rows(a, b)
    ]  # fmt: skip
    return {"a": sides[0], "b": sides[1], "rows": figures}


def report(a: Plan, b: Plan, titles: tuple[str, str]) -> RenderableType:
    """The comparison for a terminal of 80 columns or more; what is very small in both is left out."""
    head: list[RenderableType] = []
    for letter, plan, title in zip("AB", (a, b), titles):
        said, figures = view.verdict(plan)
        head.append(Text.assemble((f"{letter}  {title}", "bold"), f"  on {plan.target}, {plan.layout}"))
        head += [Text(f"   {line}", style="dim") for line in (f"{said}: {figures}", view.origin(plan)) if line]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for name in ("A", "B", "change", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    sections: dict[str, list[DiffRow]] = {}
    for row in rows(a, b):
        sections.setdefault(row.section, []).append(row)
    for section, inside in sections.items():
        units = dict.fromkeys(row.unit for row in inside)
        scales = {unit: _scale(unit, [row for row in inside if row.unit == unit]) for unit in units}
        is_one = len(scales) == 1
        table.add_row(Text(f"{section}, {scales[inside[0].unit].name}" if is_one else section, style="bold"))
        least = SMALL * max(max(row.a or 0.0, row.b or 0.0) for row in inside) if is_one else 0.0
        for row in inside:
            if max(row.a or 0.0, row.b or 0.0) >= least:
                table.add_row(*_cells(row, scales[row.unit], is_one))
    return Group(*head, Text(), table)


def _cells(row: DiffRow, scale: view.Unit, bare: bool) -> list[Text]:
    def figure(value: float | None) -> Text:
        return Text("unknown" if value is None else scale.number(value) if bare else scale(value).strip())

    change, style = row.change, "green" if row.is_better else "red"
    if change is None or not change:
        return [Text(f"  {row.name}"), figure(row.a), figure(row.b), Text("-" if change is None else "same"), Text("")]
    share = row.relative
    more = "new" if share is None else f"{share:+.1%}" if share < MANY else f"x {1 + share:,.0f}"
    signed = f"{change / scale.factor:+,.{scale.digits}f}"
    return [Text(f"  {row.name}"), figure(row.a), figure(row.b), Text(signed, style), Text(more, style)]


def _scale(unit: str, inside: list[DiffRow]) -> view.Unit:
    values = [value for row in inside for value in (row.a, row.b) if value is not None]
    if unit == "bytes":
        return view.byte_scale(values)
    if unit == "seconds":
        return view.time_scale(values)
    if unit == "FLOP":
        prefix, factor = next((one for one in view.PREFIXES if max(values, default=0.0) >= one[1]), ("", 1.0))
        return view.Unit(f"{prefix}FLOP", factor, 1)
    if unit == "days" and max(values, default=1.0) < 1:
        return view.Unit("hours", 1 / 24)
    return {
        "share": view.Unit("%", 0.01, 1), "tokens/s": view.Unit("", 1.0, 0), "days": view.Unit("days", 1.0),
    }.get(unit, view.Unit("", 1.0, 0))  # fmt: skip
