"""A plan as one HTML page that needs nothing else: no network, no scripts; light or dark as the screen is. No JAX.

Every text of a plan is escaped: names of tensors and the compiler's messages are not ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from jaxtrain.plan import plots, view
from jaxtrain.plan.result import Plan

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c2128; --dim: #57606a; --rule: #d4dae1; --track: #eef1f4;
  --good: #1a7f37; --bad: #c2202c; --unknown: #8a6100;
  --params: #3b74c0; --gradients: #b4509a; --optimizer: #14909b; --gathered: #d09c10; --activations: #4c9a4c;
  --batch: #868d96; --compute: #4c9a4c; --communication: #d5812d; --bubble: #c9474f; --roof: #3b74c0; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --text: #e4e8ec; --dim: #a0a9b3; --rule: #363d46;
  --track: #22282f; --good: #57c773; --bad: #ff7b80; --unknown: #e3b341;
  --params: #6ca0e8; --gradients: #d983c2; --optimizer: #45bcc6; --gathered: #e5bb4a; --activations: #74c274;
  --batch: #a3abb5; --compute: #74c274; --communication: #eca35c; --bubble: #f0787e; --roof: #6ca0e8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 940px; padding: 28px 20px 60px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 10px; padding-top: 14px; border-top: 1px solid var(--rule); }
p { margin: 6px 0; } .dim, th, caption { color: var(--dim); font-weight: normal; }
.verdict { font-weight: 600; } .fits { color: var(--good); } .does-not-fit, .not-compiled { color: var(--bad); }
.fit-unknown { color: var(--unknown); }
.facts { display: flex; flex-wrap: wrap; gap: 14px 36px; margin: 18px 0 0; padding: 0; }
.facts div { max-width: 260px; } .facts dt { color: var(--dim); font-size: 13px; }
.facts dd { margin: 0; font-size: 21px; font-weight: 600; } .facts dd.dim { font-size: 13px; font-weight: 400; }
.wide { overflow-x: auto; } .beside { display: flex; flex-wrap: wrap; gap: 8px 48px; }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 2px 0 6px; }
th, td { text-align: left; padding: 3px 20px 3px 0; vertical-align: top; }
th.number, td.number { text-align: right; white-space: nowrap; }
tr { border-bottom: 1px solid var(--rule); } tr.total td { font-weight: 600; } td.code { overflow-wrap: anywhere; }
.code, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 8px; border-radius: 2px; }
svg { width: 100%; min-width: 640px; height: auto; display: block; margin: 4px 0; }
svg text { fill: var(--text); font-size: 12.5px; }
rect.track { fill: var(--track); } .grid { stroke: var(--rule); } .axis { stroke: var(--dim); }
.limit { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 4 3; }
.level { stroke: var(--communication); stroke-width: 1.8; }
.leader { fill: none; stroke: var(--dim); }
.point { fill: var(--compute); stroke: var(--back); stroke-width: 1.5; }
.roof { fill: none; stroke: var(--roof); stroke-width: 2.2; } .dashed { stroke-dasharray: 6 4; stroke-width: 1.6; }
""" + "\n".join(
    f"rect.{name} {{ fill: var(--{name}); }} .swatch.{name} {{ background: var(--{name}); }}"
    for name in (*view.MEMORY, "compute", "communication", "bubble")
)


class Html(str):
    """Text that is markup already."""


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
    body = "\n".join(f"<section><h2>{name}</h2>\n{text}\n</section>" for name, text in sections.items() if text)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}: plan for {escape(plan.target)}</title>
<style>{STYLE}</style></head>
<body>
{_headline(plan, title)}
{body}
</body></html>"""


def _headline(plan: Plan, title: str) -> str:
    said, figures = view.verdict(plan)
    devices = f"{plan.devices:,} x {plan.device}" if plan.devices else plan.device
    facts = view.headline(plan) if plan.can_run else []
    cards = "\n".join(
        f'<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd><dd class="dim">{escape(fact.note)}</dd></div>'
        for fact in facts
    )
    kind = said.replace(" ", "-")
    return f"""<header><h1>{escape(title)}</h1>
<p class="dim">{escape(plan.target)}: {escape(devices)}; layout {escape(plan.layout)}</p>
<p><span class="verdict {kind}">{said.capitalize()}</span> &#160;{escape(figures)}</p>
<dl class="facts">{cards}</dl></header>"""


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int], total: bool = False) -> str:
    """A table; `numbers` are the columns of figures, `total` marks the last row."""
    style = [' class="number"' if column in numbers else "" for column in range(len(titles))]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(style, titles))
    lines = ["".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(style, row)) for row in rows]
    marks = [""] * (len(lines) - 1) + [' class="total"' if total else ""]
    body = "\n".join(f"<tr{mark}>{line}</tr>" for mark, line in zip(marks, lines))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _plot(svg: str) -> str:
    return f'<div class="wide">{svg}</div>'


def _cell(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def _code(text: str) -> Html:
    return Html(f'<span class="code">{escape(text)}</span>')


def _swatch(kind: str, name: str) -> Html:
    return Html(f'<span class="swatch {escape(kind)}"></span>{escape(name)}')


def _memory(plan: Plan) -> str:
    rows = view.memory(plan)
    if not rows:
        return ""
    whole = plan.usable or plan.needs
    unit = view.byte_scale(size for *_, size in rows)
    cells: list[tuple[str, str, str]] = [
        (_swatch(kind, name), unit.number(size), f"{size / whole:.1%}") for kind, name, size in rows
    ]
    if host := plan.memory.get("host", 0):
        cells.append(("offloaded to the host, not of the device", unit.number(host), "-"))
    cells.append(("in all", unit.number(plan.needs), f"{plan.needs / whole:.1%}"))
    of = "of usable" if plan.usable else "of what it needs"
    table = _table(("", unit.name, of), cells, (1, 2), total=True)
    return f'{_plot(plots.memory(plan))}\n<p class="dim">{escape(view.capacity(plan))}</p>\n{table}'


def _times(plan: Plan) -> str:
    if not view.times(plan):
        return ""
    why = view.why_no_time(plan)
    note = f'<p class="dim">Computing alone, no step time: {escape(why)}.</p>' if why else ""
    whole = plan.compute_seconds or 1.0
    unit = view.time_scale([whole])
    split = "".join(
        _table(
            (f"computing by {name}", unit.name, "share"),
            [(part, unit.number(seconds), f"{seconds / whole:.1%}") for part, seconds in plan.seconds_by[name].items()],
            (1, 2),
        )
        for name in ("phase", "part") if plan.seconds_by.get(name)
    )  # fmt: skip
    flops = _table(("FLOPs of a device", "", ""), [(f.name, f.value, f.note) for f in view.flops(plan)], (1,))
    return f'{note}{_plot(plots.times(plan))}\n<div class="beside">{split}</div>\n{flops}'


def _roofline(plan: Plan) -> str:
    drawn = plots.roofline(plan)
    note = (
        "Points: parts of the step that multiply. Levels: FLOP/s of the compiled step while it computes, and with "
        "waiting. Dashed: what programs achieve."
    )
    return f'{_plot(drawn)}\n<p class="dim">{note}</p>' if drawn else ""


def _traffic(plan: Plan) -> str:
    if not plan.traffic:
        return ""
    size = view.byte_scale(row.bytes for row in plan.traffic)
    time = view.time_scale(row.seconds or 0.0 for row in plan.traffic)
    titles = ("axes", "network", "operation", "count", size.name, time.name, "hidden", f"waits {time.name}")
    rows = [
        (row.axes, row.network, row.op, f"{row.count:,}", size.number(row.bytes), time.number(row.seconds),
         view.hidden(row), time.number(None if row.seconds is None else row.exposed))
        for row in plan.traffic
    ]  # fmt: skip
    count, waits = sum(row.count for row in plan.traffic), time.number(plan.exposed_seconds)
    whole = None if plan.exposed_seconds is None else sum(row.seconds or 0.0 for row in plan.traffic)
    rows.append(("total", "", "", f"{count:,}", size.number(plan.wire_bytes), time.number(whole), "", waits))
    note = "What a device sends in a step. Hidden: the share of the time that passes while the device computes."
    return f'<p class="dim">{note}</p>\n{_table(titles, rows, (3, 4, 5, 6, 7), total=True)}'


def _largest(plan: Plan) -> str:
    if not plan.tensors and not plan.buffers:
        return ""
    unit = view.byte_scale([size for _, size in plan.tensors] + [size for *_, size in plan.buffers])
    state = _table(
        (unit.name, "of the train state"), [(unit.number(size), _code(name)) for name, size in plan.tensors], (0,)
    )
    made = [(unit.number(size), _code(shape), _code(scope or "-")) for shape, scope, size in plan.buffers]
    return f"{state}\n{_table((unit.name, 'made by a step', 'in'), made, (0,))}"


def _conclusion(plan: Plan) -> str:
    said = f"<p>{escape(plan.limit or view.why_no_time(plan))}</p>"
    if not plan.advice:
        return said
    rows = [(view.gain(one), _code(one.change), one.why) for one in plan.advice]
    return f"{said}\n{_table(('gain', 'what would help most', 'why'), rows, (0,))}"


def _assumptions(plan: Plan) -> str:
    lines = [*view.assumptions(plan), "1 GB is 1e9 bytes, 1 GiB is 2^30", "nothing was run: the step was compiled only"]
    return "<ul>" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
