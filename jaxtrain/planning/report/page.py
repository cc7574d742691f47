"""Plan as one self-contained HTML page, without network or scripts; light or dark as the screen is.

All text of a plan is escaped: names of tensors and the compiler's messages may contain anything.
"""

from __future__ import annotations

from html import escape

from jaxtrain.io import html
from jaxtrain.planning.report import plots, values
from jaxtrain.planning.result import Plan

COLOURS = {
    "params": ("#3b74c0", "#6ca0e8"), "gradients": ("#b4509a", "#d983c2"), "optimizer": ("#14909b", "#45bcc6"),
    "gathered": ("#d09c10", "#e5bb4a"), "activations": ("#4c9a4c", "#74c274"), "workspace": ("#8a6a4a", "#b8936c"),
    "batch": ("#868d96", "#a3abb5"), "compute": ("#4c9a4c", "#74c274"),
    "communication": ("#d5812d", "#eca35c"), "bubble": ("#c9474f", "#f0787e"),
    "roof": ("#3b74c0", "#6ca0e8"),
}  # fmt: skip
STYLE = """
.level { stroke: var(--communication); stroke-width: 1.8; }
.leader { fill: none; stroke: var(--dim); }
.point { fill: var(--compute); stroke: var(--back); stroke-width: 1.5; }
.roof { fill: none; stroke: var(--roof); stroke-width: 2.2; } .dashed { stroke-dasharray: 6 4; stroke-width: 1.6; }
"""
VERDICTS = {"fits": "good", "does not fit": "bad", "not compiled": "bad", "fit unknown": "unknown"}


def page(plan: Plan, title: str) -> str:
    """Builds the HTML document of a plan.

    Args:
        plan: to show.
        title: name of the config.
    """
    sections = {
        "Memory of a device": _memory(plan),
        "Time of a step": _time(plan),
        "Roofline": _roofline(plan),
        "Communication": _traffic(plan),
        "Largest tensors and buffers": _largest(plan),
        "Bottleneck": _bottleneck(plan),
        "Assumptions": html.bullet_list([
            *values.assumptions(plan), "1 GB is 1e9 bytes, 1 GiB is 2^30", "the step was compiled, not run",
        ]),
    }  # fmt: skip
    name = f"{title}: plan for {plan.target}"
    return html.page(name, _headline(plan, title), sections, html.colour_css(COLOURS) + STYLE)


def _headline(plan: Plan, title: str) -> str:
    verdict, figures = values.verdict(plan)
    devices = f"{plan.devices:,} x {plan.device}" if plan.devices else plan.device
    facts = values.headline(plan) if plan.can_run else []
    cards = html.cards((fact.name, fact.value, fact.note) for fact in facts)
    layout = "; ".join(filter(None, (f"layout {plan.layout}", values.pods_text(plan))))
    return f"""<header><h1>{escape(title)}</h1>
<p class="dim">{escape(plan.target)}: {escape(devices)}; {escape(layout)}</p>
<p><span class="verdict {VERDICTS[verdict]}">{verdict.capitalize()}</span> &#160;{escape(figures)}</p>
{cards}</header>"""


def _memory(plan: Plan) -> str:
    rows = values.memory_rows(plan)
    if not rows:
        return ""
    total = plan.usable or plan.needs
    unit = values.byte_unit(size for *_, size in rows)
    cells: list[tuple[str, str, str]] = [
        (html.swatch(kind, name), unit.number(size), f"{size / total:.1%}") for kind, name, size in rows
    ]
    if host := plan.memory.get("host", 0):
        cells.append(("offloaded to the host, not of the device", unit.number(host), "-"))
    cells.append(("total", unit.number(plan.needs), f"{plan.needs / total:.1%}"))
    share = "of usable" if plan.usable else "of total"
    table = html.table(("", unit.name, share), cells, (1, 2), total=True)
    return f"{html.scrollable(plots.memory(plan))}\n{html.remark(values.memory_note(plan))}\n{table}"


def _time(plan: Plan) -> str:
    if not values.time_parts(plan):
        return ""
    why = values.why_no_time(plan)
    note = html.remark(f"Computation only, no step time: {why}.") if why else ""
    total = plan.compute_seconds or 1.0
    unit = values.time_unit([total])
    tables = "".join(
        html.table(
            (f"computing by {name}", unit.name, "share"),
            [(part, unit.number(seconds), f"{seconds / total:.1%}") for part, seconds in plan.seconds_by[name].items()],
            (1, 2),
        )
        for name in ("phase", "part") if plan.seconds_by.get(name)
    )  # fmt: skip
    facts = [(fact.name, fact.value, fact.note) for fact in values.flops_facts(plan)]
    flops = html.table(("FLOPs of a device", "", ""), facts, (1,))
    return f'{note}{html.scrollable(plots.time(plan))}\n<div class="beside">{tables}</div>\n{flops}'


def _roofline(plan: Plan) -> str:
    plot = plots.roofline(plan)
    note = (
        "Points: parts of the step that multiply. Levels: FLOP/s of the compiled step while it computes, and with "
        "waiting. Dashed: rates that programs reach."
    )
    return f"{html.scrollable(plot)}\n{html.remark(note)}" if plot else ""


def _traffic(plan: Plan) -> str:
    if not plan.traffic:
        return ""
    size = values.byte_unit(row.bytes for row in plan.traffic)
    time = values.time_unit(row.seconds or 0.0 for row in plan.traffic)
    titles = ("axes", "network", "operation", "count", size.name, time.name, "hidden", f"waits {time.name}")
    rows = [values.traffic_cells(row, size, time) for row in (*plan.traffic, values.traffic_total(plan))]
    note = "Sent by a device in a step. Hidden: share of the time that overlaps with computation."
    return f"{html.remark(note)}\n{html.table(titles, rows, (3, 4, 5, 6, 7), total=True)}"


def _largest(plan: Plan) -> str:
    if not plan.tensors and not plan.buffers:
        return ""
    unit = values.byte_unit([size for *_, size in (*plan.tensors, *plan.buffers)])
    tensors = [(unit.number(size), html.code(name)) for name, size in plan.tensors]
    buffers = [(unit.number(size), html.code(shape), html.code(scope or "-")) for shape, scope, size in plan.buffers]
    tables = html.table((unit.name, "of the train state"), tensors, (0,))
    return f"{tables}\n{html.table((unit.name, 'buffer of a step', 'allocated in'), buffers, (0,))}"


def _bottleneck(plan: Plan) -> str:
    text = f"<p>{escape(plan.bottleneck or values.why_no_time(plan))}</p>"
    if not plan.advice:
        return text
    rows = [(values.gain_text(one), html.code(one.change), one.why) for one in plan.advice]
    return f"{text}\n{html.table(('gain', 'change', 'why'), rows, (0,))}"
