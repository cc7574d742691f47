"""Pipeline schedules from a user's file.

A CSV file has a row for each stage and a column for each tick:

    F0,F1,,,,B0,,B1
    ,F0,F1,,B0,,B1

`F3` is the forward of microbatch 3, `B3` its backward, `F3.1` the forward of chunk 1; an empty cell or `.` is idle. If
the file has `W3` too (weight gradients), `B3` is the input gradient alone and `BW3` is both in one. Lines that begin
with `#` are comments. Three of them are read: `# placement: v` (placement of the chunks, `loop` or `v`, see `Table`),
`# microbatches: 4` (expected number of microbatches) and `# peak: 3` (the most microbatches whose activations a stage
may hold).

A YAML file has the same names as keys. Under `stages` it has for each stage a list of cells, or a line of cells
separated by blanks:

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
from jaxtrain.pipeline.schedules.shipped import shipped_table
from jaxtrain.pipeline.schedules.table import Action, Table, Task
from jaxtrain.pipeline.schedules.validate import check_table

SUFFIXES = (".csv", ".yaml", ".yml")
KEYS = ("placement", "microbatches", "peak")
CELL = re.compile(r"(F|BW|B|W)([0-9]{1,6})(?:\.([0-9]{1,3}))?")


def load_table(
    schedule: str, stages: int | None = None, microbatches: int | None = None, chunks: int | None = None
) -> Table:
    """Returns the checked table of a shipped schedule, or of a file.

    Args:
        schedule: name of a shipped schedule, or path of a .csv, .yaml or .yml file.
        stages: expected number; may be None for a file only.
        microbatches: expected number; may be None for a file only.
        chunks: expected number; None takes the schedule's default, or what the file has.

    Raises:
        ScheduleError: unknown schedule, a table that can not run, or a file with other numbers than expected.
        OSError: the file can not be read.
    """
    if is_file(schedule):
        return _read_file(Path(schedule), stages, microbatches, chunks)
    if stages is None or microbatches is None:
        raise ScheduleError(f"schedule {schedule}: expected the numbers of stages and microbatches")
    table = shipped_table(schedule, stages, microbatches, chunks)
    check_table(table)
    return table


def is_file(schedule: str) -> bool:
    """Returns whether a schedule is the path of a file."""
    return schedule.lower().endswith(SUFFIXES)


def _read_file(path: Path, stages: int | None, microbatches: int | None, chunks: int | None) -> Table:
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows, options = _parse_csv(text) if path.suffix.lower() == ".csv" else _parse_yaml(text)
        _check_options(options)
        table = _table(path.stem, rows, options)
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: expected a text file in UTF-8") from None
    except _FileContentError as error:
        raise ScheduleError(escape_unprintable(f"{path}: {error}")) from None
    for label, actual, expected in (
        ("stages", table.stages, stages),
        ("microbatches", table.microbatches, microbatches),
        ("chunks", table.chunks, chunks),
    ):
        if expected is not None and actual != expected:
            raise ScheduleError(f"{path}: {label}: the table has {actual}; expected {expected}")
    check_table(table, str(path), options.get("peak"))
    return table


class _FileContentError(ValueError):
    """Error in a file, without its name."""


def _parse_csv(text: str) -> tuple[list[list[str]], dict[str, Any]]:
    options: dict[str, Any] = {}
    lines = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            key, colon, value = line.lstrip(" \t#").partition(":")
            if colon and key.strip() in KEYS:
                options[key.strip()] = _load_yaml(value.strip() or "null")
        elif line.strip():
            lines.append(line)
    try:
        return list(csv.reader(lines)), options
    except csv.Error as error:
        raise _FileContentError(f"expected comma-separated cells; {error}") from None


def _load_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise _FileContentError(f"{where}not YAML: {getattr(error, 'problem', None) or 'unreadable'}") from None


def _parse_yaml(text: str) -> tuple[list[list[Any]], dict[str, Any]]:
    content = _load_yaml(text)
    if not isinstance(content, dict) or not isinstance(content.get("stages"), list):
        raise _FileContentError("expected a key `stages` with a list of cells for each stage")
    for key in content:
        if key not in (*KEYS, "stages"):
            hint = did_you_mean(key, (*KEYS, "stages")) or f"; expected {join_words((*KEYS, 'stages'))}"
            raise _FileContentError(f"no key {format_value(str(key))}{hint}")
    rows = [row.split() if isinstance(row, str) else row for row in content.pop("stages")]
    for stage, row in enumerate(rows):
        if not isinstance(row, list):
            raise _FileContentError(f"stages: stage {stage}: expected a list of cells; found {format_value(row)}")
    return rows, content


def _table(name: str, cells: Sequence[Sequence[Any]], options: dict[str, Any]) -> Table:
    rows = [[_parse_cell(cell, stage, tick) for tick, cell in enumerate(row)] for stage, row in enumerate(cells)]
    tasks = [task for row in rows for task in row if task]
    if not tasks:
        raise _FileContentError("no actions; expected a row of cells such as F0 and B0 for each stage")
    if not any(task.action == Action.W for task in tasks):
        fused = {Action.B: Action.BW}
        rows = [[task and task._replace(action=fused.get(task.action, task.action)) for task in row] for row in rows]
    ticks = max(tick + 1 for row in rows for tick, task in enumerate(row) if task)  # later columns are empty
    return Table.from_rows(
        [row[:ticks] for row in rows],
        name=name,
        placement=options.get("placement") or "loop",
        microbatches=_count("microbatch", {task.microbatch for task in tasks}, options.get("microbatches")),
        chunks=_count("chunk", {task.chunk for task in tasks}, None),
    )


def _check_options(options: dict[str, Any]) -> None:
    if options.get("placement", "loop") not in ("loop", "v"):
        raise _FileContentError(f"placement: expected loop or v; found {format_value(options['placement'])}")
    for key, kind, label in (("microbatches", int, "whole number"), ("peak", int | float, "number")):
        value = options.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
            raise _FileContentError(f"{key}: expected a {label} above 0; found {format_value(value)}")


def _count(label: str, numbers: set[int], expected: int | None) -> int:
    """Returns the count of `numbers`, and checks that they are 0, 1, 2, ..."""
    count = expected or len(numbers)
    missing = next((i for i in range(count) if i not in numbers), None)
    if missing is not None:
        raise _FileContentError(f"{label} {missing} is missing in the table; expected every one of 0 to {count - 1}")
    return count


def _parse_cell(cell: Any, stage: int, tick: int) -> Task | None:
    text = "" if cell is None else str(cell).strip()
    if text in ("", "."):
        return None
    if match := CELL.fullmatch(text):
        return Task(Action[match[1]], int(match[2]), int(match[3] or 0))
    parts = [part for part in re.split(r"[\s+/;]+", text) if part]
    if len(parts) > 1 and all(CELL.fullmatch(part) for part in parts):
        problem = f"{format_value(text)} is {len(parts)} actions; expected one a tick"
    else:
        problem = f"expected a cell such as F3, B3, W3, F3.1 or nothing; found {format_value(text)}"
    raise _FileContentError(f"stage {stage}, tick {tick}: {problem}")
