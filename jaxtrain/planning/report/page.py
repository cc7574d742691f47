"""Plan as one self-contained HTML page, without network or scripts; light or dark as the screen is."""

from __future__ import annotations

from jaxtrain.io import html
from jaxtrain.io.figure import as_html
from jaxtrain.planning.report import island_values, plots, values
from jaxtrain.planning.result import Plan

COLOURS = {
    "params": ("#3b74c0", "#6ca0e8"), "gradients": ("#b4509a", "#d983c2"), "optimizer": ("#14909b", "#45bcc6"),
    "sync": ("#7a5cc0", "#a48be6"),
    "gathered": ("#d09c10", "#e5bb4a"), "activations": ("#4c9a4c", "#74c274"), "workspace": ("#8a6a4a", "#b8936c"),
    "batch": ("#868d96", "#a3abb5"), "compute": ("#4c9a4c", "#74c274"),
    "communication": ("#d5812d", "#eca35c"), "bubble": ("#c9474f", "#f0787e"),
    "roof": ("#3b74c0", "#6ca0e8"),
}  # fmt: skip


def page(plan: Plan, name: str) -> str:
    """Builds the HTML document of a plan.

    Args:
        plan: to show.
        name: name of the config.
    """
    modules = {"plots": plots, "values": values, "island_values": island_values}
    return html.render("planning/report/page.html", COLOURS, plan=plan, name=name, **modules)


@as_html.register
def framed(plan: Plan) -> str:
    """Returns the page as a part of a notebook."""
    return html.frame(page(plan, f"{plan.layout} on {plan.target}"))
