"""Pipeline bubble: what a schedule adds to the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.config.schema import Config
from jaxtrain.hlo.parse import Instruction
from jaxtrain.pipeline.schedules.cost import Costs, price
from jaxtrain.pipeline.schedules.files import load
from jaxtrain.pipeline.schedules.table import Action, Table
from jaxtrain.planning.cost.roofline import Cost


def table(config: Config, stages: int) -> Table | None:
    """The schedule's table; None without stages."""
    if stages == 1:
        return None
    return load(config.pipeline.schedule, stages, config.step.microbatches, config.pipeline.virtual_stages)


def shares(schedule: Table) -> dict[str, float]:
    """Returns how often a stage does each `Action` in a tick, on average over ticks and stages; and how often an end of
    the model, which is once a microbatch.
    """
    counts = np.bincount(schedule.action.ravel(), minlength=len(Action)) / schedule.action.size
    ends = dict.fromkeys(("begin", "loss", "end"), schedule.microbatches / schedule.ticks)
    return {action.name: float(counts[action]) for action in Action} | ends


def choose(schedule: Table, instruction: Instruction) -> list[float] | None:
    """`shares` of a loop of one turn or none of the schedule's; None of anything else."""
    return [shares(schedule)[instruction.turn]] if instruction.turn else None


@dataclass(frozen=True)
class Bubble:
    """Seconds of all ticks (`lockstep`: each takes as long as its costliest action) and of a stage's own `work`."""

    work: float
    lockstep: float

    @property
    def seconds(self) -> float:
        """Seconds that a stage waits."""
        return self.lockstep - self.work


def bubble(schedule: Table, cost: Cost) -> Bubble:
    """Computes the bubble from the seconds of the actions in a compiled step, analysed with `choose`."""
    seconds = _of_actions(schedule, cost)
    both = seconds[Action.BW]
    # A backward in one piece is a B and a W together.
    costs = [seconds[Action.F], seconds[Action.B] or both / 2, seconds[Action.W] or both / 2]
    found = price(schedule, Costs(*(one * schedule.chunks for one in costs)))
    return Bubble(found.work, found.lockstep)


def _of_actions(schedule: Table, cost: Cost) -> Sequence[float]:
    """Seconds of one action of each kind."""
    counts = np.bincount(schedule.action.ravel(), minlength=len(Action)) / schedule.stages
    totals = np.zeros(len(Action))
    for one in cost.operations:
        if one.kind != "collective":
            for action in Action:
                totals[action] += one.total * (action.name in one.turns)
    return np.divide(totals, counts, out=np.zeros_like(totals), where=counts > 0).tolist()
