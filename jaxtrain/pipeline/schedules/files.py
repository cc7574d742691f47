"""Schedules from a user's file.

A CSV file has a row for each stage and a column for each tick:

    F0,F1,,,,B0,,B1
    ,F0,F1,,B0,,B1

`F3` is the forward of microbatch 3, `B3` its backward, `F3.1` that of chunk 1; an empty cell or `.` is nothing. Where
the file has `W3` as well (weight gradients), `B3` is the input gradient alone and `BW3` both in one. Lines that begin
with `#` are comments, of which `# placement: v`, `# microbatches: 4` and `# peak: 3` are read: where chunks are (`loop`
or `v`, see `Table`), how many microbatches there must be, and how many microbatches' activations a stage may keep.

A YAML file has the same names as keys, and under `stages` a list of cells, or a line of cells with blanks between them,
for each stage:

    placement: v
    stages:
      - F0 F0.1 B0.1 B0
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxtrain.errors import ScheduleError, did_you_mean, escape_unprintable, format_value, join_words
from jaxtrain.pipeline.schedules.shipped import make
from jaxtrain.pipeline.schedules.table import Action, Step, Table, from_rows
from jaxtrain.pipeline.schedules.validate import check

SUFFIXES = (".csv", ".yaml", ".yml")
KEYS = ("placement", "microbatches", "peak")
CELL = re.compile(r"(F|BW|B|W)([0-9]{1,6})(?:\.([0-9]{1,3}))?")


def load(schedule: str, stages: int | None = None, microbatches: int | None = None, chunks: int | None = None) -> Table:
    """The checked table of a shipped schedule, or of a file (its name ends with .csv, .yaml or .yml).

    Raises:
        ScheduleError: no such schedule, or a table that cannot run; a file also where it has other stages,
            microbatches or chunks than asked for, which may be left out only for a file.
        OSError: the file cannot be read.
    """
    if is_file(schedule):
        return read(schedule, stages, microbatches, chunks)
    if stages is None or microbatches is None:
        raise ScheduleError(f"schedule {schedule}: expected the numbers of stages and microbatches")
    table = make(schedule, stages, microbatches, chunks)
    check(table)
    return table


def is_file(schedule: str) -> bool:
    """Returns whether the name of a schedule is that of a file."""
    return schedule.lower().endswith(SUFFIXES)


def read(
    path: str | Path, stages: int | None = None, microbatches: int | None = None, chunks: int | None = None
) -> Table:
    """The checked table of a CSV or YAML file; see `load`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows, options = _csv(text) if path.suffix.lower() == ".csv" else _yaml(text)
        _check_options(options)
        table = _table(path.stem, rows, options)
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: expected a text file in UTF-8") from None
    except _Wrong as error:
        raise ScheduleError(escape_unprintable(f"{path}: {error}")) from None
    for what, have, want in (
        ("stages", table.stages, stages),
        ("microbatches", table.microbatches, microbatches),
        ("chunks", table.chunks, chunks),
    ):
        if want is not None and have != want:
            raise ScheduleError(f"{path}: {what}: the table has {have}; expected {want}")
    check(table, str(path), options.get("peak"))
    return table


class _Wrong(ValueError):
    """Error in a file, without its name."""


def _csv(text: str) -> tuple[list[list[str]], dict[str, Any]]:
    options: dict[str, Any] = {}
    lines = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            key, colon, value = line.lstrip(" \t#").partition(":")
            if colon and key.strip() in KEYS:
                options[key.strip()] = yaml.safe_load(value.strip() or "null")
        elif line.strip():
            lines.append(line)
    try:
        return list(csv.reader(lines)), options
    except csv.Error as error:
        raise _Wrong(f"expected comma-separated cells; {error}") from None


def _yaml(text: str) -> tuple[list[list[Any]], dict[str, Any]]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise _Wrong(f"{where}not YAML: {getattr(error, 'problem', None) or 'unreadable'}") from None
    if not isinstance(content, dict) or not isinstance(content.get("stages"), list):
        raise _Wrong("expected a key `stages` with a list of cells for each stage")
    for key in content:
        if key not in (*KEYS, "stages"):
            hint = did_you_mean(key, (*KEYS, "stages")) or f"; expected {join_words((*KEYS, 'stages'))}"
            raise _Wrong(f"no key {format_value(str(key))}{hint}")
    rows = [row.split() if isinstance(row, str) else row for row in content.pop("stages")]
    for stage, row in enumerate(rows):
        if not isinstance(row, list):
            raise _Wrong(f"stages: stage {stage}: expected a list of cells; found {format_value(row)}")
    return rows, content


def _table(name: str, cells: Sequence[Sequence[Any]], options: dict[str, Any]) -> Table:
    rows = [[_step(cell, stage, tick) for tick, cell in enumerate(row)] for stage, row in enumerate(cells)]
    steps = [step for row in rows for step in row if step]
    if not steps:
        raise _Wrong("no actions; expected a row of cells such as F0 and B0 for each stage")
    if not any(step.action == Action.W for step in steps):
        rows = [[step and step._replace(action=_fused(step.action)) for step in row] for row in rows]
    ticks = max(tick + 1 for row in rows for tick, step in enumerate(row) if step)  # later columns are empty
    return from_rows(
        [row[:ticks] for row in rows],
        name=name,
        placement=options.get("placement") or "loop",
        microbatches=_count("microbatch", {step.microbatch for step in steps}, options.get("microbatches")),
        chunks=_count("chunk", {step.chunk for step in steps}, None),
    )


def _check_options(options: dict[str, Any]) -> None:
    if options.get("placement", "loop") not in ("loop", "v"):
        raise _Wrong(f"placement: expected loop or v; found {format_value(options['placement'])}")
    for key, kind, what in (("microbatches", int, "whole number"), ("peak", int | float, "number")):
        value = options.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
            raise _Wrong(f"{key}: expected a {what} above 0; found {format_value(value)}")


def _count(what: str, numbers: set[int], wanted: int | None) -> int:
    """Returns how many there are, which must be 0 to the last one."""
    count = wanted or len(numbers)
    absent = next((i for i in range(count) if i not in numbers), None)
    if absent is not None:
        raise _Wrong(f"{what} {absent} is nowhere in the table; expected every one of 0 to {count - 1}")
    return count


def _fused(action: Action) -> Action:
    return Action.BW if action == Action.B else action


def _step(cell: Any, stage: int, tick: int) -> Step | None:
    text = "" if cell is None else str(cell).strip()
    if text in ("", "."):
        return None
    match = CELL.fullmatch(text)
    if match is None:
        parts = [part for part in re.split(r"[\s+/;]+", text) if part]
        if len(parts) > 1 and all(CELL.fullmatch(part) for part in parts):
            raise _Wrong(
                f"stage {stage}, tick {tick}: {format_value(text)} is {len(parts)} actions; expected one a tick"
            )
        right = "expected a cell such as F3, B3, W3, F3.1 or nothing"
        raise _Wrong(f"stage {stage}, tick {tick}: {right}; found {format_value(text)}")
    return Step(Action[match[1]], int(match[2]), int(match[3] or 0))
