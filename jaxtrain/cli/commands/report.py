"""`jaxtrain report RUN_DIR`: prints the time accounting, curves and restarts of a run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import jaxtrain
from jaxtrain.cli.output import check_output_files, write_file
from jaxtrain.io.jsonl import to_json
from jaxtrain.io.terminal import plain_console
from jaxtrain.planning.report.terminal import bar, plain_table, section
from jaxtrain.reports import tables
from jaxtrain.reports.history import RunHistory, as_dict, format_seconds
from jaxtrain.reports.page import page
from jaxtrain.trackers.console import count, number, percent

STYLES = {"compute": "green", "replay": "magenta", "down": "red", "data": "yellow"}
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, by row and column


def run(args: argparse.Namespace) -> int:
    """Prints the report and writes the requested files.

    Raises:
        UserError: the folder is not a run, or a file cannot be written.
    """
    check_output_files(args.json, args.html)
    history = jaxtrain.report(args.run)
    console = plain_console()
    console.print(report(history, console.width))
    if args.json:
        write_file(args.json, json.dumps(to_json(as_dict(history)), indent=1, default=str))
    if args.html:
        write_file(args.html, page(history))
    return 0


def report(run: RunHistory, width: int) -> RenderableType:
    """Builds the report for a terminal of `width` columns."""
    parts = [
        _headline(run), _goodput(run, width), _slow_steps(run), _curve(run, "loss", "loss", width, 8, number),
        _curve(run, f"{run.unit}_per_sec", f"{run.unit}/s", width, 4, count), _attempts(run), _scores(run),
        _checkpoints(run), _notices(run),
    ]  # fmt: skip
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts if part))


def _headline(run: RunHistory) -> RenderableType:
    table = plain_table("", "", "", right=())
    for figure in tables.key_figures(run):
        table.add_row(Text(figure.name, style="dim"), Text(figure.value, style="bold", no_wrap=True), Text(figure.note))
    return Group(Text.assemble((run.name, "bold"), f"  {run.directory}"), Text(run.state), table)


def _goodput(run: RunHistory, width: int) -> RenderableType | None:
    if run.goodput is None:
        return Text("goodput unknown: the run recorded no time accounting")
    table = plain_table("", "time", "share", "", right=("time", "share"))
    for name, what, seconds, share in tables.buckets(run):
        drawn = bar(share, STYLES.get(name, "blue"), max(8, min(24, width - 64)))
        table.add_row(Text(what, overflow="ellipsis", no_wrap=True), format_seconds(seconds), percent(share), drawn)
    several = len(run.attempts) > 1 or (run.info.get("processes") or 1) > 1
    note = "of process 0, over all restarts" if several else ""
    return section("where the time went", note, table)


def _slow_steps(run: RunHistory) -> RenderableType | None:
    rows = tables.slow_steps(run)
    columns = ("step", "step time", "of it waiting for data")
    return section("slowest steps", tables.slow_steps_note(run), _table(columns, rows, columns)) if rows else None


def _curve(
    run: RunHistory, key: str, title: str, width: int, rows: int, figure: Callable[[float], str]
) -> RenderableType | None:
    points = [(step, value) for step, value in run.series(key) if math.isfinite(value)]
    if len(points) < 2:
        return None
    means = columns(points, 2 * max(10, min(64, width - 14)))
    labels = [figure(max(means)), *[""] * (rows - 2), figure(min(means))]
    lines = braille(means, rows)
    drawn = [Text.assemble((f"{label:>10} ", "dim"), (line, "blue")) for label, line in zip(labels, lines)]
    ends = f"steps {points[0][0]:,} to {points[-1][0]:,}"
    return section(title, ends, *drawn)


def columns(points: Sequence[tuple[int, float]], total: int) -> list[float]:
    """Resamples (step, value) points to `total` evenly spaced values: means, and linear interpolation in gaps."""
    steps, values = np.array(points, float).T
    bins = ((steps - steps[0]) * (total - 1) // max(1, steps[-1] - steps[0])).astype(int)
    counts = np.bincount(bins)
    filled = np.flatnonzero(counts)
    means = np.bincount(bins, values)[filled] / counts[filled]
    return np.interp(np.arange(filled[-1] + 1), filled, means).tolist()


def braille(values: Sequence[float], height: int) -> list[str]:
    """Draws a curve in `height` lines of braille characters (2 x 4 dots each), one column of dots per value."""
    low, high = min(values), max(values)
    cells = [[0] * math.ceil(len(values) / 2) for _ in range(height)]
    for column, value in enumerate(values):
        row = round((high - value) / ((high - low) or 1.0) * (4 * height - 1))
        cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    return ["".join(chr(0x2800 + dots) for dots in line).rstrip("\u2800") for line in cells]


def _attempts(run: RunHistory) -> RenderableType | None:
    columns = ("began", "steps", "duration", "training", "down", "how it ended")
    table = _table(columns, tables.attempts(run), ("duration", "training", "down"))
    lines = [Text(line) for line in tables.failed_generations(run)]
    more = len(run.attempts) - tables.MAX_ROWS
    return section("starts and ends", f"the newest; {more:,} more before" if more > 0 else "", table, *lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> Table:
    table = plain_table(*columns, right=right)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _scores(run: RunHistory) -> RenderableType | None:
    rows = tables.scores(run)
    columns = ("metric", "first", "last", "lowest", "highest")
    table = _table(columns, rows, columns[1:])
    return section("validation", "", table) if rows else None


def _checkpoints(run: RunHistory) -> RenderableType | None:
    if not run.saves:
        return None
    columns = ("step", "size", "on disk after s", "training waited s")
    table = _table(columns, tables.checkpoints(run)[-5:], ("step", "size"))
    return section("checkpoints", f"{len(run.saves):,} saved; the newest:", table)


def _notices(run: RunHistory) -> RenderableType | None:
    lines = [Text(line) for line in tables.notices(run)]
    return section("warnings and other events", "", *lines) if lines else None
