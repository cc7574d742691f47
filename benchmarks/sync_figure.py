"""Draws docs/images/sync.svg from the JSON of sync.py: loss against tokens, bytes on the wire and virtual time.

python benchmarks/sync_figure.py [benchmarks/results/cpu-sync.json]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sync
from pictures import COLOURS, text, write

RESULTS = Path(__file__).parent / "results" / "cpu-sync.json"
FAMILIES = ("bsp", "bsp-", "local_sgd", "post_local", "diloco", "streaming", "muloco", "gossip", "ssp", "asp")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
PANEL, TOP, HEIGHT, LEFT = 300, 40, 330, 46
Run = dict[str, Any]
AXES: dict[str, Callable[[Run], list[float]]] = {
    "million tokens": lambda run: [tokens / 1e6 for tokens in run["tokens"]],
    "MB that a replica sent": lambda run: [sent / 1e6 for sent in run["sent"]],
    "virtual time, slow link, in steps": lambda run: run["wall"]["slow"],
}


def family(way: str) -> int:
    """Place of the longest family that the name begins with."""
    return max((i for i, name in enumerate(FAMILIES) if way.startswith(name)), key=lambda i: len(FAMILIES[i]))


def pens(ways: list[str]) -> dict[str, str]:
    """How the line of each way is drawn: a colour for a family, a dash for each of it."""
    seen: dict[int, int] = {}
    out = {}
    for way in ways:
        place = family(way)
        dash = DASHES[seen.setdefault(place, 0) % len(DASHES)]
        seen[place] += 1
        colour = "#000000" if way == "bsp" else COLOURS[(place - 1) % len(COLOURS)]
        out[way] = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"'
    return out


def panel(left: float, title: str, runs: dict[str, Run], is_log: bool, top_loss: float) -> list[str]:
    """One set of axes with the curves of all ways."""
    lines = {way: (AXES[title](run), run["losses"]) for way, run in runs.items()}
    low = min(min(losses) for _, losses in lines.values())
    scale = math.log10 if is_log else float
    xs = [scale(x) for values, _ in lines.values() for x in values]
    first, last = (min(xs) if is_log else 0.0), max(xs)
    width = PANEL - LEFT - 14
    pen = pens(list(runs))
    out = [text(left + LEFT, 22, title, "bold")]
    for step in range(5):
        loss = low + (top_loss - low) * step / 4
        y = TOP + HEIGHT * (1 - step / 4)
        out.append(text(left + LEFT - 6, y + 4, f"{loss:.2f}", "small dim", "end"))
        out.append(f'<path class="outline" fill="none" d="M{left + LEFT} {y:.1f}h{width}"/>')
    for step in range(4):
        value = first + (last - first) * step / 3
        shown = 10**value if is_log else value
        x = left + LEFT + width * step / 3
        out.append(
            text(x, TOP + HEIGHT + 18, f"{shown:,.2g}" if shown < 10 else f"{shown:,.0f}", "small dim", "middle")
        )
    for way, (values, losses) in lines.items():
        shown_points = [
            f"{left + LEFT + width * (scale(x) - first) / (last - first):.1f},"
            f"{TOP + HEIGHT * (1 - (loss - low) / (top_loss - low)):.1f}"
            for x, loss in zip(values, losses, strict=True) if loss <= top_loss
        ]  # fmt: skip
        title_of = f"<title>{way}: {losses[-1]:.3f}</title>"
        out.append(f'<polyline {pen[way]} points="{" ".join(shown_points)}">{title_of}</polyline>')
    return out


def main() -> None:
    runs = json.loads((Path(sys.argv[1]) if sys.argv[1:] else RESULTS).read_text())["results"]["runs"]
    best = sync.best_runs(runs, "small")
    top_loss = min(best["bsp"]["unigram_entropy"], max(run["losses"][1] for run in best.values()))
    parts: list[str] = []
    for place, title in enumerate(AXES):
        parts += panel(place * PANEL, title, best, place > 0, top_loss)
    pen = pens(list(best))
    parts.append(text(3 * PANEL + 16, 22, "validation loss at the end", "bold"))
    for place, (way, run) in enumerate(sorted(best.items(), key=lambda item: item[1]["losses"][-1])):
        y = TOP + 10 + place * 16
        parts.append(f'<path {pen[way]} d="M{3 * PANEL + 16} {y - 4}h30"/>')
        parts.append(text(3 * PANEL + 52, y, f"{run['losses'][-1]:.3f}  {way}", "small"))
    label = "Validation loss against tokens, bytes sent and virtual time, for every way in which replicas can agree"
    write("sync.svg", 3 * PANEL + 220, TOP + HEIGHT + 30, label, parts)


if __name__ == "__main__":
    main()
