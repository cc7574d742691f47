"""Report of a verification: a table, details, and the verdict."""

from __future__ import annotations

from math import isnan

from rich.table import Table

from jaxtrain.io import html
from jaxtrain.io.figure import TEXT_WIDTH, Plot, as_html, as_text, draw, new_figure, plain_text
from jaxtrain.verification.compare import GRADIENT, LOSS, UPDATE, Verdict
from jaxtrain.verification.outcome import LayoutResult, Outcome

WIDE, WIDEST = 110, 140  # columns from which the worst tensor, and the collectives, are in the table


def table(outcome: Outcome, width: int) -> Table:
    """Builds a line per layout and mesh: worst differences relative to one device.

    On terminals narrower than WIDE or WIDEST, `details` has the worst tensor and the collectives.
    """
    gap = 2 if width >= WIDE else 1
    out = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    titles = ["layout", "mesh", "micro", "loss", "gradient", "update", "verdict"]
    for title in titles + ["worst tensor"] * (width >= WIDE):
        out.add_column(title, no_wrap=True, overflow="ellipsis")
    if width >= WIDEST:
        out.add_column("collectives per step", overflow="fold", style="dim")
    for row in outcome.rows:
        verdict = row.verdict
        head = (row.candidate.layout, row.candidate.mesh, _microbatches(row))
        if verdict is None:
            out.add_row(*head, "", "", "", "[red]failed[/red]")
            continue
        numbers = map(_number, _differences(verdict))
        text = "[green]equal[/green]" if verdict.is_equal else "[red]differs[/red]"
        more = (verdict.tensor, row.collectives)[: (width >= WIDE) + (width >= WIDEST)]
        out.add_row(*head, *numbers, text, *more)
    return out


def details(outcome: Outcome, width: int) -> list[str]:
    """Lines per layout and mesh for what a narrow `table` leaves out."""
    if width >= WIDEST:
        return []
    lines = []
    for row in outcome.rows:
        if row.verdict is not None:
            worst = f"{row.verdict.tensor}; " * (width < WIDE)
            lines.append(f"{row.candidate.layout} {row.candidate.mesh} {_microbatches(row)}: {worst}{row.collectives}")
    return ["", f"{'worst tensor; ' * (width < WIDE)}collectives per step", *lines, ""]


def summary_lines(outcome: Outcome) -> list[str]:
    """Lines for the failures and their causes, the layouts that were not tried, and the verdict."""
    different = [row for row in outcome.rows if not row.is_equal]
    lines = [f"{name}: not tried: {reason}" for name, reason in outcome.refused.items()]
    lines += [f"{row.candidate.layout} on {row.candidate.mesh}: {_failure(row)}" for row in different]
    lines += outcome.notes
    if not outcome.rows:
        return [*lines, f"NOTHING COMPARED: no layout was tried on {outcome.devices} devices"]
    tried = f"{len(outcome.rows)} layouts and meshes of {outcome.devices} devices, {outcome.steps} steps"
    limits = f"loss {LOSS:g}, gradient {GRADIENT:g} of its norm, update {UPDATE:g}"
    if different:
        return [*lines, f"DIFFERENT: {len(different)} of {tried} differ from one device ({limits})"]
    return [*lines, f"EQUAL: {tried} equal one device ({limits})"]


@as_html.register
def html_table(outcome: Outcome) -> str:
    """Returns the table for notebooks, with the verdict."""
    rows = []
    for row in outcome.rows:
        numbers = ["", "", "", ""]
        if row.verdict is not None:
            numbers = [*map(_number, _differences(row.verdict)), row.verdict.tensor]
        verdict = "equal" if row.is_equal else _failure(row)
        rows.append([row.candidate.layout, row.candidate.mesh, _microbatches(row), *numbers, verdict])
    titles = ("layout", "mesh", "micro", "loss", "gradient", "update", "worst tensor", "verdict")
    return html.table(titles, rows, summary_lines(outcome)[-1])


@as_text.register
def outcome_text(outcome: Outcome) -> str:
    """Returns the table and the verdict for terminals."""
    return plain_text(table(outcome, TEXT_WIDTH), *summary_lines(outcome))


@draw.register
def outcome_figure(outcome: Outcome) -> Plot:
    """Draws the differences of each layout from one device, on a logarithmic scale, with their limits."""
    rows = [(row, row.verdict) for row in outcome.rows if row.verdict is not None]
    figure, (axes,) = new_figure([1], (8, 1.5 + 0.22 * len(rows)))
    names = [f"{row.candidate.layout}, {row.candidate.mesh}, {_microbatches(row)}" for row, _ in rows]
    for index, (name, limit) in enumerate((("loss", LOSS), ("gradient", GRADIENT), ("update", UPDATE))):
        found = [max(_differences(verdict)[index], 1e-9) for _, verdict in rows]
        (drawn,) = axes.plot(found, range(len(rows)), "o", markersize=4, label=f"{name}, at most {limit:g}")
        axes.axvline(limit, color=drawn.get_color(), linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("relative difference from one device")
    axes.legend(fontsize=8)
    axes.invert_yaxis()
    return Plot(figure)


def _differences(verdict: Verdict) -> tuple[float, float, float]:
    return verdict.loss, verdict.gradient, verdict.update


def _number(difference: float) -> str:
    return "-" if isnan(difference) else f"{difference:.1e}"


def _microbatches(row: LayoutResult) -> str:
    return str(row.candidate.config.step.microbatches)


def _failure(row: LayoutResult) -> str:
    if row.verdict is None:
        return f"failed: {row.error}"
    cause = f"; {row.verdict.cause}" if row.verdict.cause else ""
    return f"first difference: {row.verdict.first}{cause}"
