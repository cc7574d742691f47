"""Cost of a schedule's table: time, bubble, activations, messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxtrain.pipeline.schedules.table import Action, Table, needs, parts


class Costs(NamedTuple):
    """Seconds, or any unit, for one microbatch on a whole stage; an action of one of v chunks takes a v-th of it.

    A backward in one piece (BW) costs backward + weight.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True)
class ScheduleCost:
    """A table's figures. Times are in the unit of the costs.

    Args:
        name: of the schedule.
        ticks: of the table.
        work: time that every stage computes.
        lockstep: time of all ticks, each as long as the costliest action in it: one SPMD program pays this.
        span: time until the last stage is done, where each goes on as soon as it can: the bound of the schedule.
        longest: time of the stage that takes longest from its first action to its last, in the same run.
        peak: activations kept at most, by stage, in microbatches of a whole stage.
        sends: tensors that go from stage to stage, activations and gradients, of a whole step.
    """

    name: str
    ticks: int
    work: float
    lockstep: float
    span: float
    longest: float
    peak: np.ndarray
    sends: int

    @property
    def lockstep_bubble(self) -> float:
        """Share of the lockstep time in which a stage does not compute."""
        return 1 - self.work / self.lockstep

    @property
    def bubble(self) -> float:
        """Share of the span in which a stage does not compute: 1 - work / span. Megatron-LM (arXiv 2104.04473, 2.2.1)
        divides the same idle time by the work."""
        return 1 - self.work / self.span

    @property
    def longest_bubble(self) -> float:
        """1 - work / longest: the bubble rate of the zero-bubble papers (arXiv 2401.10241, 5.3; 2405.15362).

        It leaves out that stages start and end at different times, which costs nothing only where a stage updates its
        weights and starts the next step without waiting for the others.
        """
        return 1 - self.work / self.longest


def price(table: Table, costs: Costs = Costs()) -> ScheduleCost:  # noqa: B008 a tuple cannot change
    """Computes the figures of a table. It must have passed `check`."""
    durations = action_costs(table, costs)
    start = start_times(table, costs)
    is_busy = table.action != Action.NOTHING
    end = start + durations[table.action]
    first, last = np.where(is_busy, start, np.inf).min(axis=0), np.where(is_busy, end, 0).max(axis=0)
    work = float(durations[table.action[:, 0]].sum())
    return ScheduleCost(
        table.name,
        table.ticks,
        work,
        lockstep=float(tick_times(table, costs).sum()),
        span=float(last.max()),
        longest=float((last - first).max()),
        peak=peak(table),
        sends=sends(table),
    )


def action_costs(table: Table, costs: Costs) -> np.ndarray:
    """float64 [5]: time of each `Action` of this table."""
    forward, backward, weight = costs
    return np.array([0, forward, backward, weight, backward + weight]) / table.chunks


def tick_times(table: Table, costs: Costs) -> np.ndarray:
    """float64 [ticks]: time of each tick in lockstep, that of its costliest action."""
    return action_costs(table, costs)[table.action].max(axis=1)


def start_times(table: Table, costs: Costs) -> np.ndarray:
    """float64 [ticks, stages]: when each action starts where a stage starts its next one as soon as it can.

    Every stage keeps the table's order of actions; messages take no time. 0 where there is nothing to do.
    """
    durations, last = action_costs(table, costs), table.virtual.size - 1
    done = np.zeros((4, table.virtual.size, table.microbatches))
    free = np.zeros(table.stages)
    start = np.zeros(table.action.shape)
    # By ticks, so that what an action needs has its time already.
    for tick, stage, (action, microbatch, chunk) in table.steps():
        virtual = int(table.virtual[stage, chunk])
        ready = [done[kind, at, microbatch] for kind, at in needs(action, virtual, last)]
        start[tick, stage] = max(free[stage], *ready, 0)
        free[stage] = start[tick, stage] + durations[action]
        for kind in parts(action):
            done[kind, virtual, microbatch] = free[stage]
    return start


def peak(table: Table) -> np.ndarray:
    """float64 [stages]: activations kept at most, in microbatches of a whole stage (1/chunks for each chunk's).

    Each counts from its F to its W (or BW), as in the papers.
    """
    return table.kept.max(axis=0) / table.chunks


def sends(table: Table) -> int:
    """Tensors that go from one stage to another in a step: an activation and a gradient at every cut between stages."""
    stages = table.home[:, 0]
    return int(2 * table.microbatches * (stages[1:] != stages[:-1]).sum())


def summary(table: Table) -> str:
    """`1f1b: 4 stages, 8 microbatches: 22 ticks, bubble 33.3% in lockstep at equal costs, 4 kept at most`."""
    found = price(table)
    chunks = f" of {table.chunks} chunks" if table.chunks > 1 else ""
    size = f"{table.name}: {table.stages} stages{chunks}, {table.microbatches} microbatches: {table.ticks} ticks"
    kept = f"{peak(table).max():g} microbatches kept at most"
    return f"{size}, bubble {found.lockstep_bubble:.1%} in lockstep where F, B and W cost the same, {kept}"
