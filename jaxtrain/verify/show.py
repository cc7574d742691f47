"""The outcome of a verification as a table and a last line. No JAX."""

from __future__ import annotations

from rich.table import Table

from jaxtrain.verify.compare import GRADIENT, LOSS, UPDATE
from jaxtrain.verify.run import Outcome, Row


def table(outcome: Outcome) -> Table:
    """A line per layout and mesh, worst differences relative to one device."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("layout", "mesh", "micro", "loss", "gradient", "worst tensor", "update", "verdict"):
        out.add_column(title, no_wrap=title not in ("verdict", "worst tensor"), overflow="fold")
    out.add_column("collectives per step", overflow="fold", style="dim")
    for row in outcome.rows:
        config = row.candidate.config
        head = (row.candidate.layout, row.candidate.mesh, str(config.step.accumulate))
        if row.verdict is None:
            out.add_row(*head, "", "", "", "", f"[red]failed: {row.error}[/red]", "")
            continue
        seen = row.verdict
        numbers = (f"{seen.loss:.1e}", f"{seen.gradient:.1e}", seen.tensor, f"{seen.update:.1e}")
        said = "[green]equal[/green]" if seen.is_equal else f"[red]differs: {seen.first}[/red]"
        out.add_row(*head, *numbers, said, row.collectives)
    return out


def lines(outcome: Outcome) -> list[str]:
    """What failed and why, what was not tried, and the verdict."""
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


def _fault(row: Row) -> str:
    if row.verdict is None:
        return f"failed: {row.error}"
    cause = f"; {row.verdict.cause}" if row.verdict.cause else ""
    return f"first wrong: {row.verdict.first}{cause}"
