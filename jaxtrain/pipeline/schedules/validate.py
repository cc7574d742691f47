"""Validation of a schedule table: every action once, after its dependencies, within the memory limit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxtrain.errors import ScheduleError
from jaxtrain.pipeline.schedules.table import Action, Table, Task, dependencies, unfuse

MAX_PROBLEMS = 10  # in one error


def check_table(table: Table, where: str = "", peak: float | None = None) -> None:
    """Raises an error if a table can not run, or would not compute the gradients.

    Every microbatch passes every virtual stage once forward and once backward (B then W, or BW). The dependencies of an
    action, on whichever stage, are done at an earlier tick.

    Args:
        table: the table.
        where: file or name that starts every line of the error.
        peak: activations that a stage may hold, in microbatches of a whole stage; default: any number.

    Raises:
        ScheduleError: up to 10 problems, one line each: stage, tick and microbatch, and what would be right.
    """
    problems = list(_out_of_range(table)) or [*_repeated(table), *_too_early(table), *_missing(table)]
    if not problems and peak is not None:
        problems = list(_over_peak(table, peak))
    if problems:
        more = len(problems) - MAX_PROBLEMS
        lines = problems[:MAX_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])
        raise ScheduleError("\n".join(f"{where or table.name}: {line}" for line in lines))


def _position(table: Table, stage: int, tick: int, task: Task) -> str:
    """Returns `stage 1, tick 3, microbatch 0`, with the chunk if there are several."""
    return f"stage {stage}, tick {tick}, microbatch {task.microbatch}{_chunk_suffix(table, task.chunk)}"


def _chunk_suffix(table: Table, chunk: int) -> str:
    return f", chunk {chunk}" if table.chunks > 1 else ""


def _out_of_range(table: Table) -> Iterator[str]:
    for tick, stage, task in table.tasks():
        if not 0 <= task.microbatch < table.microbatches:
            position = _position(table, stage, tick, task)
            yield f"{position}: expected a microbatch of 0 to {table.microbatches - 1}"
        if not 0 <= task.chunk < table.chunks:
            yield f"stage {stage}, tick {tick}: chunk {task.chunk}: expected a chunk of 0 to {table.chunks - 1}"


def _repeated(table: Table) -> Iterator[str]:
    first: dict[tuple[Action, int, int, int], int] = {}
    for tick, stage, task in table.tasks():
        for part in unfuse(task.action):
            before = first.setdefault((part, stage, task.chunk, task.microbatch), tick)
            if before != tick:
                position = _position(table, stage, tick, task)
                yield f"{position}: {part.name} is done at tick {before} already; expected once"


def _too_early(table: Table) -> Iterator[str]:
    """Yields actions before their dependencies."""
    last = table.virtual_stage.size - 1
    for tick, stage, task in table.tasks():
        for part, virtual in dependencies(task.action, int(table.virtual_stage[stage, task.chunk]), last):
            done = int(table.tick_of[part, virtual, task.microbatch])
            if done >= tick:
                source_stage, chunk = table.location[virtual].tolist()
                source = f"{part.name} of stage {source_stage}{_chunk_suffix(table, chunk)}"
                name = table.letter(task.action)
                yield (
                    f"{_position(table, stage, tick, task)}: {name} needs the {source}, which is done at tick {done}; "
                    f"expected {name} at tick {done + 1} or later"
                )


def _missing(table: Table) -> Iterator[str]:
    last = table.virtual_stage.size - 1
    for index, virtual, microbatch in np.argwhere(table.tick_of[Action.F :] < 0).tolist():
        part = Action(index + Action.F)
        stage, chunk = table.location[virtual].tolist()
        done = [int(table.tick_of[need, source, microbatch]) for need, source in dependencies(part, virtual, last)]
        after = f" at tick {max(done, default=-1) + 1} or later" if min(done, default=0) >= 0 else ""
        if part != Action.W or table.is_split:
            position = f"stage {stage}, microbatch {microbatch}{_chunk_suffix(table, chunk)}"
            yield f"{position}: {part.name} is missing in all {table.ticks} ticks; expected it once{after}"


def _over_peak(table: Table, peak: float) -> Iterator[str]:
    """Yields the first tick of each stage at which it holds more activations than allowed."""
    for stage, in_flight in enumerate((table.in_flight / table.chunks).T):
        over = np.flatnonzero(in_flight > peak)
        if len(over):
            tick = int(over[0])
            task = Task(Action.F, int(table.microbatch[tick, stage]), int(table.chunk[tick, stage]))
            holds = f"keeps the activations of {in_flight[tick]:g} microbatches, and up to {in_flight.max():g} later"
            yield f"{_position(table, stage, tick, task)}: {holds}; expected at most peak: {peak:g}"
