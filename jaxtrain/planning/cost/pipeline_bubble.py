"""Pipeline bubble of a compiled step: the time that a schedule adds."""

from __future__ import annotations

import numpy as np

from jaxtrain.config.schema import PipelineConfig
from jaxtrain.hlo.parse import Instruction
from jaxtrain.pipeline.schedules.cost import Costs, schedule_cost
from jaxtrain.pipeline.schedules.files import load_table
from jaxtrain.pipeline.schedules.table import Action, Table
from jaxtrain.planning.cost.roofline import StepCost


def schedule_table(pipeline: PipelineConfig, stages: int, microbatches: int) -> Table | None:
    """Loads the table of a schedule; None for one stage."""
    return None if stages == 1 else load_table(pipeline.schedule, stages, microbatches, pipeline.virtual_stages)


def loop_runs_per_tick(schedule: Table) -> dict[str, float]:
    """Mean runs per tick and stage of each loop that runs at most once: an `Action`, or an end of the model.

    The ends (`embed`, `loss`, `embed_backward`) run once per microbatch.
    """
    counts = np.bincount(schedule.action.ravel(), minlength=len(Action)) / schedule.action.size
    ends = dict.fromkeys(("embed", "loss", "embed_backward"), schedule.microbatches / schedule.ticks)
    return {action.name: float(counts[action]) for action in Action} | ends


def branch_weights(schedule: Table, instruction: Instruction) -> list[float] | None:
    """`roofline.BranchWeights` of a loop that runs at most once; None for other instructions."""
    return [loop_runs_per_tick(schedule)[instruction.once_loop]] if instruction.once_loop else None


def bubble_seconds(schedule: Table, cost: StepCost) -> float:
    """Seconds that a stage waits when each tick takes as long as its costliest action.

    Args:
        schedule: of the step.
        cost: of the compiled step, analyzed with `branch_weights`.
    """
    seconds = _action_seconds(schedule, cost)
    whole = seconds[Action.BW]
    # A backward in one piece (BW) counts as a B and a W of half its time.
    costs = [seconds[Action.F], seconds[Action.B] or whole / 2, seconds[Action.W] or whole / 2]
    priced = schedule_cost(schedule, Costs(*(one * schedule.chunks for one in costs)))
    return priced.lockstep - priced.work


def _action_seconds(schedule: Table, cost: StepCost) -> list[float]:
    """Seconds of one action of each kind."""
    counts = np.bincount(schedule.action.ravel(), minlength=len(Action)) / schedule.stages
    totals = np.zeros(len(Action))
    for one in cost.operations:
        if one.kind != "collective":
            for action in Action:
                totals[action] += one.total_seconds * (action.name in one.once_loops)
    return np.divide(totals, counts, out=np.zeros_like(totals), where=counts > 0).tolist()
