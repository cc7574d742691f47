"""Cost of a schedule's table: time, bubble, activations, messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxtrain.pipeline.schedules.table import Action, Table, dependencies, unfuse


class Costs(NamedTuple):
    """Time of one microbatch on a whole stage, in any unit; an action of one of v chunks takes 1/v of it.

    An unsplit backward (BW) costs backward + weight.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True)
class ScheduleCost:
    """Figures of a table. Times are in the unit of the costs.

    Attributes:
        name: of the schedule.
        ticks: of the table.
        work: time that every stage computes.
        lockstep: time of all ticks, each as long as its costliest action: the time of one SPMD program.
        makespan: time until the last stage is done if stages run asynchronously, each action as early as possible.
        longest_stage: in that run, time of the slowest stage from its first action to its last.
        peak: most activations held at once, by stage, in microbatches of a whole stage.
        sends: tensors sent between stages in a step, activations and gradients.
    """

    name: str
    ticks: int
    work: float
    lockstep: float
    makespan: float
    longest_stage: float
    peak: np.ndarray
    sends: int

    @property
    def lockstep_bubble(self) -> float:
        """Fraction of the lockstep time in which a stage is idle."""
        return 1 - self.work / self.lockstep

    @property
    def bubble(self) -> float:
        """Fraction of the makespan in which a stage is idle.

        Megatron-LM (arXiv 2104.04473, 2.2.1) divides the same idle time by the work.
        """
        return 1 - self.work / self.makespan

    @property
    def longest_bubble(self) -> float:
        """1 - work / longest_stage: the bubble rate of the zero-bubble papers (arXiv 2401.10241, 5.3; 2405.15362).

        It ignores that stages start and end at different times, which is free only if a stage updates its weights and
        starts the next step without waiting for the others.
        """
        return 1 - self.work / self.longest_stage


def schedule_cost(table: Table, costs: Costs = Costs()) -> ScheduleCost:  # noqa: B008 a tuple cannot change
    """Computes the figures of a table that `check_table` accepts."""
    durations, start = action_costs(table, costs), start_times(table, costs)
    is_busy = table.action != Action.IDLE
    end = start + durations[table.action]
    first, last = np.where(is_busy, start, np.inf).min(axis=0), np.where(is_busy, end, 0).max(axis=0)
    stages = table.location[:, 0]
    return ScheduleCost(
        table.name,
        table.ticks,
        work=float(durations[table.action[:, 0]].sum()),
        lockstep=float(tick_times(table, costs).sum()),
        makespan=float(last.max()),
        longest_stage=float((last - first).max()),
        peak=peak_activations(table),
        # An activation and a gradient at every boundary between stages.
        sends=int(2 * table.microbatches * (stages[1:] != stages[:-1]).sum()),
    )


def action_costs(table: Table, costs: Costs) -> np.ndarray:
    """Returns float64 [5]: time of each `Action` of this table."""
    forward, backward, weight = costs
    return np.array([0, forward, backward, weight, backward + weight]) / table.chunks


def tick_times(table: Table, costs: Costs) -> np.ndarray:
    """Returns float64 [ticks]: time of each tick in lockstep, that of its costliest action."""
    return action_costs(table, costs)[table.action].max(axis=1)


def start_times(table: Table, costs: Costs) -> np.ndarray:
    """Returns float64 [ticks, stages]: start of each action if stages run asynchronously; 0 if idle.

    Every stage keeps the table's order of actions and starts each as early as possible; messages take no time.
    """
    durations, last = action_costs(table, costs), table.virtual_stage.size - 1
    done = np.zeros((4, table.virtual_stage.size, table.microbatches))
    free = np.zeros(table.stages)
    start = np.zeros(table.action.shape)
    # By ticks: the dependencies of a task have their times already.
    for tick, stage, (action, microbatch, chunk) in table.tasks():
        virtual = int(table.virtual_stage[stage, chunk])
        ready = [done[part, source, microbatch] for part, source in dependencies(action, virtual, last)]
        start[tick, stage] = max(free[stage], *ready, 0)
        free[stage] = start[tick, stage] + durations[action]
        for part in unfuse(action):
            done[part, virtual, microbatch] = free[stage]
    return start


def peak_activations(table: Table) -> np.ndarray:
    """Returns float64 [stages]: most activations held at once, in microbatches of a whole stage.

    Each counts from its F to its W (or BW), as in the papers; that of one chunk counts 1/chunks.
    """
    return table.in_flight.max(axis=0) / table.chunks


def cost_line(table: Table) -> str:
    """Returns one line: `1f1b: 4 stages, 8 microbatches: 22 ticks, bubble 33.3% in lockstep ...`."""
    cost = schedule_cost(table)
    chunks = f" of {table.chunks} chunks" if table.chunks > 1 else ""
    size = f"{table.name}: {table.stages} stages{chunks}, {table.microbatches} microbatches: {table.ticks} ticks"
    memory = f"activations of at most {cost.peak.max():g} microbatches"
    return f"{size}, bubble {cost.lockstep_bubble:.1%} in lockstep if F, B and W cost the same, {memory}"
