"""Validation of a schedule table: every action once, in a possible order, within the memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxtrain.errors import ScheduleError
from jaxtrain.pipeline.schedules.table import Action, Step, Table, needs, parts

LISTED = 10  # problems that one error lists


def check(table: Table, where: str = "", peak: float | None = None) -> None:
    """Refuses a table that cannot run, or that would not compute the gradients.

    Every microbatch passes every virtual stage once forward and once backward (B then W, or BW); what an action needs
    is done at an earlier tick, on whichever stage.

    Args:
        where: file or name that starts every line of the error.
        peak: activations that a stage may keep, in microbatches of a whole stage; default: any number.

    Raises:
        ScheduleError: with up to 10 problems, one line each: stage, tick and microbatch, and what would be right.
    """
    problems = list(_misplaced(table)) or [*_repeated(table), *_broken(table), *_missing(table)]
    if not problems and peak is not None:
        problems = list(_overfull(table, peak))
    if problems:
        lines = [f"{where or table.name}: {problem}" for problem in problems[:LISTED]]
        more = len(problems) - LISTED
        raise ScheduleError("\n".join([*lines, *([f"{where or table.name}: ... and {more} more"] if more > 0 else [])]))


def spot(table: Table, stage: int, tick: int, step: Step) -> str:
    """`stage 1, tick 3, microbatch 0`, with the chunk where there are several."""
    return f"stage {stage}, tick {tick}, microbatch {step.microbatch}{_of_chunk(table, step.chunk)}"


def _of_chunk(table: Table, chunk: int) -> str:
    return f", chunk {chunk}" if table.chunks > 1 else ""


def _misplaced(table: Table) -> Iterator[str]:
    """Numbers out of range."""
    for tick, stage, step in table.steps():
        if not 0 <= step.microbatch < table.microbatches:
            yield f"{spot(table, stage, tick, step)}: expected a microbatch of 0 to {table.microbatches - 1}"
        if not 0 <= step.chunk < table.chunks:
            yield f"stage {stage}, tick {tick}: chunk {step.chunk}: expected a chunk of 0 to {table.chunks - 1}"


def _repeated(table: Table) -> Iterator[str]:
    first: dict[tuple[Action, int, int, int], int] = {}
    for tick, stage, step in table.steps():
        for kind in parts(step.action):
            before = first.setdefault((kind, stage, step.chunk, step.microbatch), tick)
            if before != tick:
                yield f"{spot(table, stage, tick, step)}: {kind.name} is done at tick {before} already; expected once"


def _broken(table: Table) -> Iterator[str]:
    """Actions before what they need."""
    last = table.virtual.size - 1
    for tick, stage, step in table.steps():
        for kind, virtual in needs(step.action, int(table.virtual[stage, step.chunk]), last):
            ready = int(table.when[kind, virtual, step.microbatch])
            if ready >= tick:
                at, chunk = table.home[virtual].tolist()
                source = f"{kind.name} of stage {at}{_of_chunk(table, chunk)}"
                name = table.letter(step.action)
                yield (
                    f"{spot(table, stage, tick, step)}: {name} needs the {source}, which is done at tick {ready}; "
                    f"expected {name} at tick {ready + 1} or later"
                )


def _missing(table: Table) -> Iterator[str]:
    last = table.virtual.size - 1
    for kind, virtual, microbatch in np.argwhere(table.when[Action.F :] < 0).tolist():
        kind = Action(kind + 1)
        stage, chunk = table.home[virtual].tolist()
        ready = [int(table.when[need, at, microbatch]) for need, at in needs(kind, virtual, last)]
        after = f" at tick {max(ready, default=-1) + 1} or later" if min(ready, default=0) >= 0 else ""
        if kind != Action.W or table.is_split:
            place = f"stage {stage}, microbatch {microbatch}{_of_chunk(table, chunk)}"
            yield f"{place}: {kind.name} is missing in all {table.ticks} ticks; expected it once{after}"


def _overfull(table: Table, peak: float) -> Iterator[str]:
    """The first tick of each stage at which it keeps more activations than it may."""
    for stage, kept in enumerate((table.kept / table.chunks).T):
        over = np.flatnonzero(kept > peak)
        if len(over):
            tick = int(over[0])
            step = Step(Action.F, int(table.microbatch[tick, stage]), int(table.chunk[tick, stage]))
            keeps = f"keeps the activations of {kept[tick]:g} microbatches, and up to {kept.max():g} later"
            yield f"{spot(table, stage, tick, step)}: {keeps}; expected at most peak: {peak:g}"
