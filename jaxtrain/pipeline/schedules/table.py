"""A pipeline schedule as a table: the action of each stage in each tick."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

Placement = Literal["loop", "v"]


class Action(IntEnum):
    """Action of a stage in a tick: F forward, B input gradient, W weight gradient, BW both gradients in one."""

    IDLE = 0
    F = 1
    B = 2
    W = 3
    BW = 4


class Task(NamedTuple):
    """An action on one microbatch by one chunk of a stage."""

    action: Action
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class Table:
    """A schedule in lockstep: all stages advance from tick to tick together, each with at most one action per tick.

    The result of an action is available on every stage from the next tick on. The layers are split, in their order,
    into `stages * chunks` **virtual stages**; each stage holds `chunks` of them:

    * placement `loop`: chunk c of stage s is virtual stage c * stages + s (Megatron-LM, arXiv 2104.04473);
    * placement `v`: as `loop` for even c, reversed for odd c: the last stage holds both sides of the turn, and stage 0
      the first and last virtual stage of two chunks (arXiv 2401.10241).

    Attributes:
        name: of the schedule.
        placement: `loop` or `v`.
        microbatches: number of microbatches of a step.
        chunks: virtual stages per stage.
        action: int32 [ticks, stages] of `Action`.
        microbatch: int32 [ticks, stages]; 0 if idle.
        chunk: int32 [ticks, stages]; 0 if idle.
    """

    name: str
    placement: Placement
    microbatches: int
    chunks: int
    action: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[Task | None]], *, name: str, placement: Placement, microbatches: int, chunks: int
    ) -> Table:
        """Returns the table of one row of tasks per stage, tick by tick; rows may have different lengths."""
        grid = np.zeros((3, max(map(len, rows), default=0), len(rows)), np.int32)
        for stage, row in enumerate(rows):
            for tick, task in enumerate(row):
                if task is not None:
                    grid[:, tick, stage] = task
        return cls(name, placement, microbatches, chunks, *grid)

    @property
    def ticks(self) -> int:
        return self.action.shape[0]

    @property
    def stages(self) -> int:
        return self.action.shape[1]

    @cached_property
    def is_split(self) -> bool:
        """True if some weight gradient is an action apart from the input gradient."""
        return bool((self.action == Action.W).any())

    def letter(self, action: Action) -> str:
        """Returns the name of an action in drawings and files: B stands for BW if no backward pass is split."""
        return "B" if action == Action.BW and not self.is_split else action.name

    @cached_property
    def virtual_stage(self) -> np.ndarray:
        """int32 [stages, chunks]: the virtual stage of each chunk of each stage."""
        return virtual_stages(self.placement, self.stages, self.chunks)

    @cached_property
    def location(self) -> np.ndarray:
        """int32 [stages * chunks, 2]: stage and chunk of each virtual stage."""
        location = np.empty((self.virtual_stage.size, 2), np.int32)
        for (stage, chunk), virtual in np.ndenumerate(self.virtual_stage):
            location[virtual] = stage, chunk
        return location

    def tasks(self) -> Iterator[tuple[int, int, Task]]:
        """Yields (tick, stage, task) of all tasks, by tick."""
        for tick, stage in np.argwhere(self.action != Action.IDLE).tolist():
            cell = self.action[tick, stage], self.microbatch[tick, stage], self.chunk[tick, stage]
            yield tick, stage, Task(Action(int(cell[0])), int(cell[1]), int(cell[2]))

    @cached_property
    def in_flight(self) -> np.ndarray:
        """int64 [ticks, stages]: activations, each of one chunk, that a stage holds after each tick.

        An activation is held from its F to its W (or BW).
        """
        change = (self.action == Action.F) * 1 - np.isin(self.action, (Action.W, Action.BW))
        return np.cumsum(change, axis=0)

    @cached_property
    def tick_of(self) -> np.ndarray:
        """int32 [4, stages * chunks, microbatches]: tick of each F, B and W (a BW is both); -1 if it is missing."""
        ticks = np.full((4, self.virtual_stage.size, self.microbatches), -1, np.int32)
        for tick, stage, (action, microbatch, chunk) in self.tasks():
            for part in unfuse(action):
                ticks[part, self.virtual_stage[stage, chunk], microbatch] = tick
        return ticks


def virtual_stages(placement: Placement, stages: int, chunks: int) -> np.ndarray:
    """Returns int32 [stages, chunks]: virtual stage by stage and chunk."""
    stage, chunk = np.arange(stages, dtype=np.int32)[:, None], np.arange(chunks, dtype=np.int32)
    is_reversed = (chunk % 2 == 1) & (placement == "v")
    return chunk * stages + np.where(is_reversed, stages - 1 - stage, stage)


def unfuse(action: Action) -> tuple[Action, ...]:
    """Returns the parts of an action: BW is a B and a W."""
    return (Action.B, Action.W) if action == Action.BW else (action,)


def dependencies(action: Action, virtual: int, last: int) -> list[tuple[Action, int]]:
    """Returns the (F, B or W, virtual stage) of the same microbatch that must be done before an action.

    Args:
        action: the action.
        virtual: its virtual stage.
        last: the last virtual stage, whose gradient comes from the loss.
    """
    if action == Action.F:
        return [(Action.F, virtual - 1)] if virtual else []
    if action == Action.W:
        return [(Action.B, virtual)]
    return [(Action.F, virtual), *([(Action.B, virtual + 1)] if virtual < last else [])]
