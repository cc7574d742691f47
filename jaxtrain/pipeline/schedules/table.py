"""A pipeline schedule as a table: what each stage does at each tick."""

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

    NOTHING = 0
    F = 1
    B = 2
    W = 3
    BW = 4


class Step(NamedTuple):
    """One action on one microbatch by one chunk of a stage."""

    action: Action
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class Table:
    """A schedule in lockstep: all stages go from tick to tick together, each with at most one action a tick.

    What a stage makes in a tick is there, on every stage, from the next tick on. The model is cut into
    `stages * chunks` **virtual stages** in the order of its layers; each stage holds `chunks` of them:

    * placement `loop`: chunk c of stage s is virtual stage c * stages + s (Megatron-LM, arXiv 2104.04473);
    * placement `v`: as `loop` for even c, backwards for odd c: the last stage holds both sides of the turn, and stage 0
      the first and last virtual stage of two chunks (arXiv 2401.10241).

    Args:
        name: of the schedule.
        placement: `loop` or `v`.
        microbatches: number of them, 0 to microbatches - 1.
        chunks: virtual stages of each stage.
        action: int32 [ticks, stages] of `Action`.
        microbatch: int32 [ticks, stages]; 0 where there is nothing to do.
        chunk: int32 [ticks, stages]; 0 where there is nothing to do.
    """

    name: str
    placement: Placement
    microbatches: int
    chunks: int
    action: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray

    @property
    def ticks(self) -> int:
        return self.action.shape[0]

    @property
    def stages(self) -> int:
        return self.action.shape[1]

    @cached_property
    def is_split(self) -> bool:
        """True if weight gradients are computed apart from input gradients, at least somewhere."""
        return bool((self.action == Action.W).any())

    def letter(self, action: Action) -> str:
        """The name of an action in drawings and files: B also for BW where no backward is split."""
        return "B" if action == Action.BW and not self.is_split else action.name

    @cached_property
    def virtual(self) -> np.ndarray:
        """int32 [stages, chunks]: the virtual stage that each chunk of each stage holds."""
        return virtual_stages(self.placement, self.stages, self.chunks)

    @cached_property
    def home(self) -> np.ndarray:
        """int32 [stages * chunks, 2]: stage and chunk of each virtual stage."""
        where = np.empty((self.virtual.size, 2), np.int32)
        for (stage, chunk), virtual in np.ndenumerate(self.virtual):
            where[virtual] = stage, chunk
        return where

    def steps(self) -> Iterator[tuple[int, int, Step]]:
        """(tick, stage, step) of everything done, by tick."""
        for tick, stage in np.argwhere(self.action != Action.NOTHING).tolist():
            cell = self.action[tick, stage], self.microbatch[tick, stage], self.chunk[tick, stage]
            yield tick, stage, Step(Action(int(cell[0])), int(cell[1]), int(cell[2]))

    @cached_property
    def kept(self) -> np.ndarray:
        """int64 [ticks, stages]: activations, each of one chunk, that a stage keeps after each tick.

        One is kept from its F to its W (or BW), which reads it.
        """
        change = (self.action == Action.F) * 1 - np.isin(self.action, (Action.W, Action.BW))
        return np.cumsum(change, axis=0)

    @cached_property
    def when(self) -> np.ndarray:
        """int32 [4, stages * chunks, microbatches]: tick of each F, B and W (a BW is both); -1 where it is missing."""
        ticks = np.full((4, self.virtual.size, self.microbatches), -1, np.int32)
        for tick, stage, (action, microbatch, chunk) in self.steps():
            for kind in parts(action):
                ticks[kind, self.virtual[stage, chunk], microbatch] = tick
        return ticks


def virtual_stages(placement: Placement, stages: int, chunks: int) -> np.ndarray:
    """int32 [stages, chunks]: virtual stage by stage and chunk."""
    stage, chunk = np.arange(stages, dtype=np.int32)[:, None], np.arange(chunks, dtype=np.int32)
    is_back = (chunk % 2 == 1) & (placement == "v")
    return chunk * stages + np.where(is_back, stages - 1 - stage, stage)


def parts(action: Action) -> tuple[Action, ...]:
    """The actions that one stands for: BW is a B and a W."""
    return (Action.B, Action.W) if action == Action.BW else (action,)


def needs(action: Action, virtual: int, last: int) -> list[tuple[Action, int]]:
    """Returns what must be done before an action on a microbatch: (F, B or W, virtual stage) of the same microbatch.

    Args:
        virtual: the action's own virtual stage.
        last: the last virtual stage, whose gradient comes from the loss.
    """
    if action == Action.F:
        return [(Action.F, virtual - 1)] if virtual else []
    if action == Action.W:
        return [(Action.B, virtual)]
    return [(Action.F, virtual), *([(Action.B, virtual + 1)] if virtual < last else [])]


def from_rows(
    rows: Sequence[Sequence[Step | None]], *, name: str, placement: Placement, microbatches: int, chunks: int
) -> Table:
    """The table of what each stage (a row) does from tick to tick; rows may end early."""
    grid = np.zeros((3, max(map(len, rows), default=0), len(rows)), np.int32)
    for stage, row in enumerate(rows):
        for tick, step in enumerate(row):
            if step is not None:
                grid[:, tick, stage] = step
    return Table(name, placement, microbatches, chunks, *grid)
