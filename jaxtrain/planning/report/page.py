"""A plan as one HTML page that needs nothing else: no network, no scripts; light or dark as the screen is.

Every text of a plan is escaped: names of tensors and the compiler's messages are not ours.
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
KINDS = {"fits": "good", "does not fit": "bad", "not compiled": "bad", "fit unknown": "unknown"}


def page(plan: Plan, title: str) -> str:
    """The report as an HTML document.

    Args:
        title: what was planned, e.g. the config's file.
    """
    sections = {
        "Memory of a device": _memory(plan),
        "Time of a step": _times(plan),
        "Roofline": _roofline(plan),
        "Communication": _traffic(plan),
        "Largest tensors and buffers": _largest(plan),
        "What limits it": _conclusion(plan),
        "Assumptions": _assumptions(plan),
    }
    name = f"{title}: plan for {plan.target}"
    return html.page(name, _headline(plan, title), sections, html.colour_css(COLOURS) + STYLE)


def _headline(plan: Plan, title: str) -> str:
    said, figures = values.verdict(plan)
    devices = f"{plan.devices:,} x {plan.device}" if plan.devices else plan.device
    facts = values.headline(plan) if plan.can_run else []
    cards = html.cards((fact.name, fact.value, fact.note) for fact in facts)
    origin = "; ".join(filter(None, (f"layout {plan.layout}", values.origin(plan))))
    return f"""<header><h1>{escape(title)}</h1>
<p class="dim">{escape(plan.target)}: {escape(devices)}; {escape(origin)}</p>
<p><span class="verdict {KINDS[said]}">{said.capitalize()}</span> &#160;{escape(figures)}</p>
{cards}</header>"""


def _memory(plan: Plan) -> str:
    rows = values.memory(plan)
    if not rows:
        return ""
    whole = plan.usable or plan.needs
    unit = values.byte_scale(size for *_, size in rows)
    cells: list[tuple[str, str, str]] = [
        (html.swatch(kind, name), unit.number(size), f"{size / whole:.1%}") for kind, name, size in rows
    ]
    if host := plan.memory.get("host", 0):
        cells.append(("offloaded to the host, not of the device", unit.number(host), "-"))
    cells.append(("in all", unit.number(plan.needs), f"{plan.needs / whole:.1%}"))
    of = "of usable" if plan.usable else "of what it needs"
    table = html.table(("", unit.name, of), cells, (1, 2), total=True)
    return f'{html.scrollable(plots.memory(plan))}\n<p class="dim">{escape(values.capacity(plan))}</p>\n{table}'


def _times(plan: Plan) -> str:
    if not values.times(plan):
        return ""
    why = values.why_no_time(plan)
    note = f'<p class="dim">Computing alone, no step time: {escape(why)}.</p>' if why else ""
    whole = plan.compute_seconds or 1.0
    unit = values.time_scale([whole])
    split = "".join(
        html.table(
            (f"computing by {name}", unit.name, "share"),
            [(part, unit.number(seconds), f"{seconds / whole:.1%}") for part, seconds in plan.seconds_by[name].items()],
            (1, 2),
        )
        for name in ("phase", "part") if plan.seconds_by.get(name)
    )  # fmt: skip
    flops = html.table(("FLOPs of a device", "", ""), [(f.name, f.value, f.note) for f in values.flops(plan)], (1,))
    return f'{note}{html.scrollable(plots.times(plan))}\n<div class="beside">{split}</div>\n{flops}'


def _roofline(plan: Plan) -> str:
    drawn = plots.roofline(plan)
    note = (
        "Points: parts of the step that multiply. Levels: FLOP/s of the compiled step while it computes, and with "
        "waiting. Dashed: what programs achieve."
    )
    return f'{html.scrollable(drawn)}\n<p class="dim">{note}</p>' if drawn else ""


def _traffic(plan: Plan) -> str:
    if not plan.traffic:
        return ""
    size = values.byte_scale(row.bytes for row in plan.traffic)
    time = values.time_scale(row.seconds or 0.0 for row in plan.traffic)
    titles = ("axes", "network", "operation", "count", size.name, time.name, "hidden", f"waits {time.name}")
    rows = [
        (row.axes, row.network, row.op, f"{row.count:,}", size.number(row.bytes), time.number(row.seconds),
         values.hidden(row), time.number(None if row.seconds is None else row.exposed))
        for row in plan.traffic
    ]  # fmt: skip
    count, waits = sum(row.count for row in plan.traffic), time.number(plan.exposed_seconds)
    whole = None if plan.exposed_seconds is None else sum(row.seconds or 0.0 for row in plan.traffic)
    rows.append(("total", "", "", f"{count:,}", size.number(plan.wire_bytes), time.number(whole), "", waits))
    note = "What a device sends in a step. Hidden: the share of the time that passes while the device computes."
    return f'<p class="dim">{note}</p>\n{html.table(titles, rows, (3, 4, 5, 6, 7), total=True)}'


def _largest(plan: Plan) -> str:
    if not plan.tensors and not plan.buffers:
        return ""
    unit = values.byte_scale([size for _, size in plan.tensors] + [size for *_, size in plan.buffers])
    state = html.table(
        (unit.name, "of the train state"), [(unit.number(size), html.code(name)) for name, size in plan.tensors], (0,)
    )
    made = [(unit.number(size), html.code(shape), html.code(scope or "-")) for shape, scope, size in plan.buffers]
    return f"{state}\n{html.table((unit.name, 'made by a step', 'in'), made, (0,))}"


def _conclusion(plan: Plan) -> str:
    said = f"<p>{escape(plan.limit or values.why_no_time(plan))}</p>"
    if not plan.advice:
        return said
    rows = [(values.gain(one), html.code(one.change), one.why) for one in plan.advice]
    return f"{said}\n{html.table(('gain', 'what would help most', 'why'), rows, (0,))}"


def _assumptions(plan: Plan) -> str:
    lines = [
        *values.assumptions(plan),
        "1 GB is 1e9 bytes, 1 GiB is 2^30",
        "nothing was run: the step was compiled only",
    ]
    return html.bullet_list(lines)
