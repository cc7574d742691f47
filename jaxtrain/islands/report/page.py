"""The report of a run of islands as one self-contained HTML page."""

from __future__ import annotations

from jaxtrain.io import html, svg
from jaxtrain.islands.report.history import IslandsHistory
from jaxtrain.islands.status import NOBODY
from jaxtrain.reports import plots
from jaxtrain.reports.history import RunHistory, format_seconds

PAIRS = (
    ("#2f6db3", "#6ca0e8"), ("#d1495b", "#f0787e"), ("#4c9a4c", "#74c274"), ("#d09c10", "#e5bb4a"),
    ("#7a5cc0", "#a58ce6"), ("#14909b", "#45bcc6"), ("#b4509a", "#d983c2"), ("#868d96", "#a3abb5"),
)  # fmt: skip
COLOURS = {f"line-{index}": pair for index, pair in enumerate(PAIRS)}
MAX_BINS = 20  # of the histogram; the last one has all that is larger


def islands_page(history: IslandsHistory) -> str:
    """Builds the report as an HTML document."""
    return html.render(
        "islands/report/page.html", COLOURS, history=history, curves=_curves, histogram=histogram, rows=rows(history),
        waits=wait_rows(history),
    )  # fmt: skip


def rows(history: IslandsHistory) -> list[tuple[str, ...]]:
    """Returns (island, steps, tokens, goodput, seconds waited, MB sent, late, dropped, loss) of each island."""
    return [_row(island, history) for island in history.islands]


def _row(island: int, history: IslandsHistory) -> tuple[str, ...]:
    totals, run = history.status["islands"].get(str(island), {}), history.runs.get(island)
    loss = totals.get("loss")
    return (
        str(island), f"{totals.get('clock', 0):,}", f"{totals.get('tokens', 0):,.0f}", _goodput(run),
        format_seconds(totals.get("waited", 0.0)), f"{totals.get('sent_bytes', 0) / 1e6:,.1f}",
        f"{totals.get('late', 0):.0f}", f"{totals.get('dropped', 0):.0f}", "" if loss is None else f"{loss:.4f}",
    )  # fmt: skip


def _goodput(run: RunHistory | None) -> str:
    return "" if run is None or run.goodput is None else f"{run.goodput:.1%}"


def wait_rows(history: IslandsHistory) -> list[tuple[str, str, str]]:
    """Returns (who waited, for whom, seconds), the longest first."""
    found = sorted(history.waits().items(), key=lambda item: -item[1])
    names = {NOBODY: "nobody: one left, or the grace was over"}
    return [(str(island), names.get(other, str(other)), format_seconds(seconds)) for (island, other), seconds in found]


def _curves(history: IslandsHistory, key: str, label: str) -> str:
    """Draws a metric of all islands over steps."""
    return plots.curves({f"island {island}": run.series(key) for island, run in history.runs.items()}, label)


def histogram(history: IslandsHistory) -> str:
    """Draws how many pushes of each island had which staleness, beside each other; empty without pushes."""
    counted = {island: counts for island, counts in history.staleness().items() if counts}
    if not counted:
        return ""
    bins = min(MAX_BINS, 1 + max(max(counts) for counts in counted.values()))
    heights = {
        island: [sum(n for age, n in counts.items() if min(age, bins - 1) == bin) for bin in range(bins)]
        for island, counts in counted.items()
    }  # fmt: skip
    most, height = max(map(max, heights.values())), 150
    width = (plots.RIGHT - plots.LEFT) / bins
    elements = []
    for place, (island, values) in enumerate(heights.items()):
        bar = 0.8 * width / len(heights)
        for bin, value in enumerate(values):
            if value:
                x, tall = plots.LEFT + bin * width + place * bar, value / most * (height - 10)
                title = f"island {island}: {value:,} pushes of staleness {bin}"
                elements.append(svg.rect(x, height - tall, bar, tall, f"line-{place % plots.LINES}", title))
    for bin in range(bins):
        label = f"{bin}+" if bin == MAX_BINS - 1 else str(bin)
        elements.append(svg.text(plots.LEFT + (bin + 0.4) * width, height + 18, label, "middle"))
    elements.append(svg.line(plots.LEFT, height, plots.RIGHT, height, "axis"))
    elements.append(svg.text(plots.LEFT - 8, 20, f"{most:,}", "end"))
    return svg.drawing(height + 28, elements, "pushes by staleness")
