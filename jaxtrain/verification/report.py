"""The outcome of a verification as a table and a last line."""

from __future__ import annotations

from rich.table import Table

from jaxtrain.verification.compare import GRADIENT, LOSS, UPDATE
from jaxtrain.verification.verify import LayoutResult, Outcome

WIDE, WIDEST = 110, 140  # columns from which on there is room for the worst tensor, and for the collectives


def table(outcome: Outcome, width: int) -> Table:
    """A line per layout and mesh, worst differences relative to one device; `lines` says what is wrong.

    The worst tensor and the collectives go to `details` where the screen has fewer columns than these take.
    """
    gap = 2 if width >= WIDE else 1
    out = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    titles = ["layout", "mesh", "micro", "loss", "gradient", "update", "verdict"]
    for title in titles + ["worst tensor"] * (width >= WIDE):
        out.add_column(title, no_wrap=True, overflow="ellipsis")
    if width >= WIDEST:
        out.add_column("collectives per step", overflow="fold", style="dim")
    for row in outcome.rows:
        seen = row.verdict
        head = (row.candidate.layout, row.candidate.mesh, _micro(row))
        if seen is None:
            out.add_row(*head, "", "", "", "[red]failed[/red]")
            continue
        numbers = (f"{seen.loss:.1e}", f"{seen.gradient:.1e}", f"{seen.update:.1e}")
        said = "[green]equal[/green]" if seen.is_equal else "[red]differs[/red]"
        out.add_row(*head, *numbers, said, *(seen.tensor, row.collectives)[: (width >= WIDE) + (width >= WIDEST)])
    return out


def details(outcome: Outcome, width: int) -> list[str]:
    """A line per layout and mesh of what `table` had no room for."""
    if width >= WIDEST:
        return []
    said = []
    for row in outcome.rows:
        if row.verdict is not None:
            worst = f"{row.verdict.tensor}; " * (width < WIDE)
            said.append(f"{row.candidate.layout} {row.candidate.mesh} {_micro(row)}: {worst}{row.collectives}")
    return ["", f"{'worst tensor; ' * (width < WIDE)}collectives per step", *said, ""]


def lines(outcome: Outcome) -> list[str]:
    """Returns the failures and their causes, the layouts not tried, and the verdict."""
    wrong = [row for row in outcome.rows if not row.is_equal]
    said = [f"{name}: not tried: {reason}" for name, reason in outcome.refused.items()]
    said += [f"{row.candidate.layout} on {row.candidate.mesh}: {_fault(row)}" for row in wrong]
    if not outcome.rows:
        return [*said, f"NOTHING COMPARED: no layout was tried on {outcome.devices} devices"]
    tried = f"{len(outcome.rows)} layouts and meshes of {outcome.devices} devices, {outcome.steps} steps"
    limits = f"loss {LOSS:g}, gradient {GRADIENT:g} of its norm, update {UPDATE:g}"
    if wrong:
        return [*said, f"DIFFERENT: {len(wrong)} of {tried} differ from one device ({limits})"]
    return [*said, f"EQUAL: {tried} equal one device ({limits})"]


def _micro(row: LayoutResult) -> str:
    return str(row.candidate.config.step.microbatches)


def _fault(row: LayoutResult) -> str:
    if row.verdict is None:
        return f"failed: {row.error}"
    cause = f"; {row.verdict.cause}" if row.verdict.cause else ""
    return f"first wrong: {row.verdict.first}{cause}"
