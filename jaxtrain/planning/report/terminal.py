"""Plan on a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxtrain.io.figure import as_text, plain_text
from jaxtrain.planning.report import island_values, values
from jaxtrain.planning.result import Plan

WIDE = 120  # columns from which tables are side by side
BAR = 24  # columns of a bar
EIGHTHS = " ▏▎▍▌▋▊▉"
STYLES = {
    "params": "blue", "gradients": "magenta", "optimizer": "cyan", "sync": "blue", "gathered": "yellow",
    "activations": "green", "workspace": "bright_black", "batch": "white", "compute": "green",
    "communication": "yellow", "bubble": "red",
}  # fmt: skip
VERDICTS = {
    "fits": "bold green", "does not fit": "bold red", "not compiled": "bold red", "fit unknown": "bold yellow",
}  # fmt: skip


def report(plan: Plan, title: str, width: int) -> RenderableType:
    """Builds the report of a plan.

    Args:
        plan: to show.
        title: name of the config.
        width: columns of the terminal.
    """
    parts = [_headline(plan, title), _memory(plan), _largest(plan, width), _traffic(plan, width), _times(plan, width)]
    parts += [_islands(plan), _conclusion(plan), _assumptions(plan)]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts[:-1] if part), *filter(None, parts[-1:]))


@as_text.register
def plan_text(plan: Plan) -> str:
    """Returns the verdict, the figures and what would help."""
    return plain_text(_headline(plan, "plan"), _conclusion(plan))


def plain_table(*columns: str, right: Sequence[str] = (), gap: int = 2) -> Table:
    """Empty table without lines; the columns named in `right` hold numbers, which are never cut."""
    out = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_header=any(columns))
    for name in columns:
        out.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    return out


def bar(share: float, style: str, width: int = BAR) -> Text:
    """Bar for a share from 0 to 1 of `width` columns, in eighths of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    text = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
    return Text(text or ("▏" if share > 0 else ""), style=style)


def section(title: str, note: str, *body: RenderableType) -> RenderableType:
    """Section with a bold title, a note, and its contents."""
    return Group(Text.assemble((title, "bold"), ("  " if note else "", ""), (note, "dim")), *body)


def _facts(facts: Sequence[values.PlanFact]) -> Table:
    out = plain_table()
    out.add_column(no_wrap=True, style="dim")
    out.add_column(no_wrap=True, style="bold", justify="right")
    out.add_column(overflow="fold")
    for fact in facts:
        out.add_row(fact.name, fact.value, Text(fact.note))
    return out


def _side_by_side(width: int, left: RenderableType, right: RenderableType) -> RenderableType:
    """Puts two renderables side by side, or one below the other on a narrow terminal."""
    if width < WIDE:
        return Group(left, Text(), right)
    both = Table.grid(padding=(0, 4, 0, 0))
    both.add_row(left, right)
    return both


def _headline(plan: Plan, title: str) -> RenderableType:
    devices = f"{plan.devices:,} x {plan.device}" if plan.devices else plan.device
    verdict, figures = values.verdict(plan)
    lines = [Text.assemble((title, "bold"), f"  on {plan.target} ({devices})"), Text(f"layout {plan.layout}")]
    if pods := values.pods_text(plan):
        lines.append(Text(pods, style="yellow"))
    lines.append(Text.assemble((verdict.upper(), VERDICTS[verdict]), "  ", figures))
    return Group(*lines, *([_facts(values.headline(plan))] if plan.can_run else []))


def _memory(plan: Plan) -> RenderableType | None:
    rows = values.memory_rows(plan)
    if not rows:
        return None
    total = plan.usable or plan.needs
    unit = values.byte_unit(size for *_, size in rows)
    table = plain_table("of a device", unit.name, "share", "", right=(unit.name, "share"))
    bars = [(name, size, STYLES[kind]) for kind, name, size in rows]
    bars += [("free", max(0, total - plan.needs), "bright_black")] if plan.usable else []
    for name, size, style in bars:
        table.add_row(name, unit.number(size), f"{size / total:.1%}", bar(size / total, style))
    if host := plan.memory.get("host", 0):
        table.add_row("offloaded to the host", unit.number(host), "-", "not of the device")
    return section("memory", values.memory_note(plan), table)


def _largest(plan: Plan, width: int) -> RenderableType | None:
    if not plan.tensors and not plan.buffers:
        return None
    unit = values.byte_unit([size for *_, size in (*plan.tensors, *plan.buffers)])
    tensors = plain_table(unit.name, "largest tensors of the train state", right=(unit.name,))
    for name, size in plan.tensors:
        tensors.add_row(unit.number(size), Text(name, overflow="ellipsis", no_wrap=True))
    buffers = plain_table(unit.name, "largest buffers of a step", "allocated in", right=(unit.name,))
    buffers.columns[1].no_wrap = True
    for shape, scope, size in plan.buffers:
        buffers.add_row(unit.number(size), Text(shape), Text(scope or "-", overflow="ellipsis", no_wrap=True))
    return _side_by_side(width, tensors, buffers)


def _traffic(plan: Plan, width: int) -> RenderableType | None:
    if not plan.traffic:
        return None if plan.devices > 1 else Text("communication: none, there is one device", style="dim")
    size = values.byte_unit(row.bytes for row in plan.traffic)
    time = values.time_unit(row.seconds or 0.0 for row in plan.traffic)
    titles = ("axes", "network", "operation", "count", size.name, time.name, "hidden", f"waits {time.name}")
    table = plain_table(*titles, right=titles[3:], gap=2 if width >= WIDE else 1)
    table.columns[2].no_wrap = True
    for row in plan.traffic:
        table.add_row(*values.traffic_cells(row, size, time))
    if len(plan.traffic) > 1:
        table.add_row(*values.traffic_cells(values.traffic_total(plan), size, time), style="bold")
    return section("communication", "sent by a device in a step; hidden: while it computes", table)


def _times(plan: Plan, width: int) -> RenderableType | None:
    parts = values.time_parts(plan)
    if not parts:
        return None
    total = plan.step_seconds or sum(part.seconds for part in parts)
    unit = values.time_unit([total])
    table = plain_table("", unit.name, "share", "", right=(unit.name, "share"))
    for part in parts:
        share = part.seconds / total
        table.add_row(part.name, unit.number(part.seconds), f"{share:.1%}", bar(share, STYLES[part.group]))
    why = values.why_no_time(plan)
    note = f"computation only: {why}" if why else f"{unit(plan.step_seconds)} a step"
    split = Table.grid(padding=(0, 2, 0, 0))
    for name in ("phase", "part"):
        shares = (f"{part} {unit.number(seconds)}" for part, seconds in plan.seconds_by.get(name, {}).items())
        split.add_row(Text(f"computing by {name}", style="dim"), ", ".join(shares))
    flops = section("FLOPs", "of a device and step", _facts(values.flops_facts(plan)))
    return _side_by_side(width, section("time", note, table, split), flops)


def _islands(plan: Plan) -> RenderableType | None:
    if (islands := plan.islands) is None:
        return None
    titles, rows = island_values.choice_cells(islands)
    table = plain_table(*titles, right=titles[1:], gap=1)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row)
    choice = Text.assemble(("choose", "bold"), f"  {island_values.choice_text(islands)}")
    facts = _facts(island_values.islands_facts(islands))
    return section("islands", island_values.islands_note(islands), facts, Text(), table, choice)


def _conclusion(plan: Plan) -> RenderableType:
    body: list[RenderableType] = []
    if plan.advice:
        table = plain_table()
        table.add_column(no_wrap=True, style="bold green", justify="right")
        table.add_column(overflow="fold")
        for one in plan.advice:
            table.add_row(values.gain_text(one), Text.assemble((one.change, "bold"), f": {one.why}"))
        body = [Text("changes that would help most:", style="dim"), table]
    return Group(Text.assemble(("bottleneck", "bold"), f"  {plan.bottleneck or values.why_no_time(plan)}"), *body)


def _assumptions(plan: Plan) -> RenderableType:
    seconds = f"compiled in {plan.compile_seconds:,.0f} s; " if plan.compile_seconds else ""
    lines = [f"{seconds}1 GB is 1e9 bytes; the step was not run", *values.assumptions(plan)]
    table = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row(Text("-", style="dim"), Text(line, style="dim"))
    return section("assumptions", "", table)
