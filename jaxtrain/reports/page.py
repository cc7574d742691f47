"""Run report as one self-contained HTML page."""

from __future__ import annotations

from jaxtrain.io import html
from jaxtrain.io.figure import as_html, as_text
from jaxtrain.reports import plots, tables
from jaxtrain.reports.history import RunHistory, format_seconds

COLOURS = {
    "compute": ("#4c9a4c", "#74c274"), "data": ("#d09c10", "#e5bb4a"), "compile": ("#3b74c0", "#6ca0e8"),
    "init": ("#868d96", "#a3abb5"), "checkpoint": ("#14909b", "#45bcc6"), "restore": ("#7a5cc0", "#a58ce6"),
    "eval": ("#5f9ea0", "#8fc7c9"), "replay": ("#b4509a", "#d983c2"), "down": ("#c9474f", "#f0787e"),
    "exchange": ("#b87333", "#d9a066"),
    "curve": ("#2f6db3", "#6ca0e8"), "scores": ("#d1495b", "#f0787e"), "restart": ("#868d96", "#a3abb5"),
}  # fmt: skip


def page(run: RunHistory) -> str:
    """Builds the report as an HTML document."""
    return html.render("reports/page.html", COLOURS, run=run, plots=plots, tables=tables, format_seconds=format_seconds)


@as_html.register
def framed(run: RunHistory) -> str:
    """Returns the page as a part of a notebook."""
    return html.frame(page(run))


@as_text.register
def history_text(run: RunHistory) -> str:
    """Returns the key figures for terminals."""
    lines = [f"{figure.name:12} {figure.value}  {figure.note}".rstrip() for figure in tables.key_figures(run)]
    return "\n".join([f"{run.name}: {run.state}", *lines])
