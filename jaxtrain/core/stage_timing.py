"""Timing of the actions of pipeline stages on these devices."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxtrain.core.program import Program, precise
from jaxtrain.pipeline.schedules.cost import Costs
from jaxtrain.pipeline.schedules.table import Action

TICKS, ROUNDS = 8, 6  # the first round warms up


def stage_costs(program: Program, params: Any, batch: Any) -> Costs:
    """Seconds of F, B and W of one microbatch on a whole stage, measured; a backward in one piece counts half for each.

    Runs the program's own stages, all of them at the same action for some ticks, less as many ticks of waiting. It is
    compiled once, with the actions as an input.

    Args:
        params: of the train state.
        batch: a global batch on the devices.

    Raises:
        ValueError: the program has no stages.
    """
    gradients, executor = program.gradients, program.gradients.pipeline
    if executor is None:
        raise ValueError("stages of a program that has none cannot be timed")
    local = gradients.local_pipeline

    def run(params: Any, batch: Any, rows: dict[str, Any]) -> Any:
        own = replace(
            gradients, pipeline=replace(executor, given=rows), local_pipeline=local and replace(local, given=rows)
        )
        return own(params, batch, jax.random.key(0)).grads

    table = executor.table
    rows = {name: np.zeros((TICKS, table.stages), np.int32) for name in executor.rows}
    compiled = jax.jit(precise(run, program.config)).lower(params, batch, rows).compile()

    def seconds(action: int) -> float:
        given = rows | {"action": np.full_like(rows["action"], action)}
        began = time.perf_counter()
        jax.block_until_ready(compiled(params, batch, given))
        return time.perf_counter() - began

    # What else the machine does only ever adds: the least of some rounds, in which all actions take turns.
    actions = sorted({int(Action.NOTHING), *table.action.flat})
    least = np.min([[seconds(action) for action in actions] for _ in range(ROUNDS)][1:], axis=0)
    taken = np.maximum(0.0, least - least[actions.index(Action.NOTHING)]) / TICKS * table.chunks
    found = dict(zip(actions, taken.tolist(), strict=True))
    half = found.get(Action.BW, 0.0) / 2
    return Costs(found[Action.F], found.get(Action.B, half), found.get(Action.W, half))
