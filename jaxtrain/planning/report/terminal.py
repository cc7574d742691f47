"""A plan on the terminal, from 80 columns on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxtrain.planning.report import values
from jaxtrain.planning.result import Plan

WIDE = 120  # columns from which on tables stand side by side
BAR = 24  # columns of a bar
EIGHTHS = " ▏▎▍▌▋▊▉"
STYLES = {
    "params": "blue", "gradients": "magenta", "optimizer": "cyan", "gathered": "yellow", "activations": "green",
    "workspace": "bright_black", "batch": "white", "compute": "green", "communication": "yellow", "bubble": "red",
}  # fmt: skip
VERDICTS = {
    "fits": "bold green", "does not fit": "bold red", "not compiled": "bold red", "fit unknown": "bold yellow",
}  # fmt: skip


def report(plan: Plan, title: str, width: int) -> RenderableType:
    """Prints a plan, for a terminal of `width` columns.

    Args:
        title: what was planned, e.g. the config's file.
    """
    parts = [_headline(plan, title), _memory(plan), _largest(plan, width), _traffic(plan, width), _times(plan, width)]
    parts += [_conclusion(plan), _assumptions(plan)]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts[:-1] if part), *filter(None, parts[-1:]))


def plain(*columns: str, right: Sequence[str] = (), gap: int = 2) -> Table:
    """An empty table without lines; the columns named in `right` hold numbers, which are never cut."""
    out = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_header=any(columns))
    for name in columns:
        out.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    return out


def bar(share: float, style: str, width: int = BAR) -> Text:
    """A bar of `share` (0 to 1) of `width` columns, to an eighth of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    text = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
    return Text(text or ("▏" if share > 0 else ""), style=style)


def section(title: str, note: str, *body: RenderableType) -> RenderableType:
    """A bold title, what there is to say of it, and what is below."""
    return Group(Text.assemble((title, "bold"), ("  " if note else "", ""), (note, "dim")), *body)


def _facts(facts: Sequence[values.Fact]) -> Table:
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    out.add_column(no_wrap=True, style="dim")
    out.add_column(no_wrap=True, style="bold", justify="right")
    out.add_column(overflow="fold")
    for fact in facts:
        out.add_row(fact.name, fact.value, Text(fact.note))
    return out


def _headline(plan: Plan, title: str) -> RenderableType:
    devices = f"{plan.devices:,} x {plan.device}" if plan.devices else plan.device
    said, figures = values.verdict(plan)
    lines = [Text.assemble((title, "bold"), f"  on {plan.target} ({devices})")]
    lines += [
        Text(f"layout {plan.layout}"),
        *([Text(origin, style="yellow")] if (origin := values.origin(plan)) else []),
    ]
    lines += [Text.assemble((said.upper(), VERDICTS[said]), "  ", figures)]
    return Group(*lines, *([_facts(values.headline(plan))] if plan.can_run else []))


def _memory(plan: Plan) -> RenderableType | None:
    rows = values.memory(plan)
    if not rows:
        return None
    whole = plan.usable or plan.needs
    free = max(0, whole - plan.needs)
    host = plan.memory.get("host", 0)
    unit = values.byte_scale(size for *_, size in rows)
    table = plain("of a device", unit.name, "share", "", right=(unit.name, "share"))
    for kind, name, size in rows:
        table.add_row(name, unit.number(size), f"{size / whole:.1%}", bar(size / whole, STYLES[kind]))
    if plan.usable:
        table.add_row("free", unit.number(free), f"{free / whole:.1%}", bar(free / whole, "bright_black"))
    if host:
        table.add_row("offloaded to the host", unit.number(host), "-", "not of the device")
    return section("memory", values.capacity(plan), table)


def _largest(plan: Plan, width: int) -> RenderableType | None:
    if not plan.tensors and not plan.buffers:
        return None
    unit = values.byte_scale([size for _, size in plan.tensors] + [size for *_, size in plan.buffers])
    state = plain(unit.name, "largest tensors of the train state", right=(unit.name,))
    for name, size in plan.tensors:
        state.add_row(unit.number(size), Text(name, overflow="ellipsis", no_wrap=True))
    made = plain(unit.name, "largest buffers of a step", "made by", right=(unit.name,))
    made.columns[1].no_wrap = True
    for shape, scope, size in plan.buffers:
        made.add_row(unit.number(size), Text(shape), Text(scope or "-", overflow="ellipsis", no_wrap=True))
    if width < WIDE:
        return Group(state, Text(), made)
    both = Table.grid(padding=(0, 4, 0, 0), expand=False)
    both.add_row(state, made)
    return both


def _traffic(plan: Plan, width: int) -> RenderableType | None:
    if not plan.traffic:
        return None if plan.devices > 1 else Text("communication: none, there is one device", style="dim")
    size = values.byte_scale(row.bytes for row in plan.traffic)
    time = values.time_scale(row.seconds or 0.0 for row in plan.traffic)
    titles = ("axes", "network", "operation", "count", size.name, time.name, "hidden", f"waits {time.name}")
    table = plain(*titles, right=titles[3:], gap=2 if width >= WIDE else 1)
    table.columns[2].no_wrap = True
    for row in plan.traffic:
        known = row.seconds is not None
        table.add_row(
            row.axes, row.network, row.op, f"{row.count:,}", size.number(row.bytes), time.number(row.seconds),
            values.hidden(row), time.number(row.exposed if known else None),
        )  # fmt: skip
    if len(plan.traffic) > 1:
        waits, whole = time.number(plan.exposed_seconds), sum(row.seconds or 0.0 for row in plan.traffic)
        known = plan.exposed_seconds is not None
        share = 1 - plan.exposed_seconds / whole if plan.exposed_seconds is not None and whole else None
        cells = ("total", "", "", f"{sum(row.count for row in plan.traffic):,}", size.number(plan.wire_bytes))
        hides = "-" if share is None else f"{share:.0%}"
        table.add_row(*cells, time.number(whole if known else None), hides, waits, style="bold")
    note = "what a device sends in a step; hidden: while it computes"
    return section("communication", note, table)


def _times(plan: Plan, width: int) -> RenderableType | None:
    parts = values.times(plan)
    if not parts:
        return None
    whole = plan.step_seconds or sum(part.seconds for part in parts)
    unit = values.time_scale([whole])
    table = plain("", unit.name, "share", "", right=(unit.name, "share"))
    for part in parts:
        share = part.seconds / whole
        table.add_row(part.name, unit.number(part.seconds), f"{share:.1%}", bar(share, STYLES[part.group]))
    why = values.why_no_time(plan)
    note = f"{unit(plan.step_seconds)} a step" if not why else f"computing alone: {why}"
    split = Table.grid(padding=(0, 2, 0, 0))
    for name in ("phase", "part"):
        shares = (f"{part} {unit.number(seconds)}" for part, seconds in plan.seconds_by.get(name, {}).items())
        split.add_row(Text(f"computing by {name}", style="dim"), ", ".join(shares))
    work = section("FLOPs", "of a device and step", _facts(values.flops(plan)))
    body = section("time", note, table, split)
    return Group(body, Text(), work) if width < WIDE else _beside(body, work)


def _beside(left: RenderableType, right: RenderableType) -> Table:
    both = Table.grid(padding=(0, 4, 0, 0))
    both.add_row(left, right)
    return both


def _conclusion(plan: Plan) -> RenderableType:
    body: list[RenderableType] = []
    if plan.advice:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True, style="bold green", justify="right")
        table.add_column(overflow="fold")
        for one in plan.advice:
            table.add_row(values.gain(one), Text.assemble((one.change, "bold"), f": {one.why}"))
        body = [Text("what would help most:", style="dim"), table]
    return Group(Text.assemble(("limit", "bold"), f"  {plan.limit or values.why_no_time(plan)}"), *body)


def _assumptions(plan: Plan) -> RenderableType:
    seconds = f"compiled in {plan.compile_seconds:,.0f} s; " if plan.compile_seconds else ""
    lines = [f"{seconds}1 GB is 1e9 bytes; nothing was run", *values.assumptions(plan)]
    table = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row(Text("-", style="dim"), Text(line, style="dim"))
    return section("assumptions", "", table)
