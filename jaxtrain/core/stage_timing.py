"""Measurement of the actions of pipeline stages on the devices of a run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxtrain.core.program import Program, with_matmul_precision
from jaxtrain.pipeline.schedules.cost import Costs
from jaxtrain.pipeline.schedules.table import Action

TICKS, ROUNDS = 8, 6  # the first round is a warm-up


def stage_costs(program: Program, params: Any, batch: Any) -> Costs:
    """Measures the seconds of F, B and W of one microbatch on a whole stage; an unsplit backward counts half for each.

    Runs the stages of the program, all of them with the same action for several ticks, and subtracts the time of as
    many idle ticks. The actions are an input of the program, which is compiled once.

    Args:
        program: with pipeline stages.
        params: of the train state.
        batch: a global batch on the devices.

    Raises:
        ValueError: the program has no stages.
    """
    gradients, executor = program.gradients, program.gradients.pipeline
    if executor is None:
        raise ValueError("the program has no pipeline stages to time")
    replica = gradients.replica_pipeline

    def run(params: Any, batch: Any, instructions: dict[str, Any]) -> Any:
        timed = replace(
            gradients,
            pipeline=replace(executor, timed_instructions=instructions),
            replica_pipeline=replica and replace(replica, timed_instructions=instructions),
        )
        return timed(params, batch, jax.random.key(0)).grads

    table = executor.table
    instructions = {name: np.zeros((TICKS, table.stages), np.int32) for name in executor.instructions}
    step = jax.jit(with_matmul_precision(run, program.config.precision))
    compiled = step.lower(params, batch, instructions).compile()

    def seconds(action: int) -> float:
        inputs = instructions | {"action": np.full_like(instructions["action"], action)}
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, batch, inputs))
        return time.perf_counter() - start

    # Other work of the machine only adds time, so the minimum of several interleaved rounds counts.
    actions = sorted({int(Action.IDLE), *table.action.flat})
    fastest = np.min([[seconds(action) for action in actions] for _ in range(ROUNDS)][1:], axis=0)
    per_action = np.maximum(0.0, fastest - fastest[actions.index(Action.IDLE)]) / TICKS * table.chunks
    cost = dict(zip(actions, per_action.tolist(), strict=True))
    half = cost.get(Action.BW, 0.0) / 2
    return Costs(cost[Action.F], cost.get(Action.B, half), cost.get(Action.W, half))
