"""PowerSGD whose first gradients travel in float32, as torch's `powerSGD_hook` begins after `start_powerSGD_iter`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_net
from test_compressed_gradients import stacked
from test_onebit_adam import LAYOUTS, STACK
from test_run import resumed_bitwise

from jaxtrain.config.sections.sync import CompressConfig
from jaxtrain.sync.compression.phases import first_phases

WARMUP = 3


def powersgd(warmup: int = WARMUP) -> dict[str, Any]:
    return {"strategy": "bsp", "compress": {"gradients": "powersgd", "rank": 2, "warmup": warmup}}


def test_without_a_warmup_there_is_no_first_phase() -> None:
    assert first_phases(CompressConfig(gradients="powersgd")) == []
    ((end, first),) = first_phases(CompressConfig(gradients="powersgd", warmup=7))
    assert (end, first.gradients) == (7, "none")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_steps_are_those_of_bsp_and_then_compressed_ones_begin(layout: str) -> None:
    """The first compressed step is that of a run that begins there: nothing was left to send."""
    program, exact, plain = (stacked(layout, sync) for sync in (powersgd(), {}, powersgd(0)))
    state, expected, begun = program.init(), exact.init(), plain.init()
    for step in range(WARMUP):
        state, _ = program.step_at(step)(state, tiny_net.rows(step))
        expected, _ = exact.step_at(step)(expected, tiny_net.rows(step))
        jax.tree.map(np.testing.assert_array_equal, state["params"], expected["params"])
        assert np.abs(state["sync"]["own"]["worker"]["up"]).max() == 0
    begun = {**state, "sync": begun["sync"]}
    state = jax.tree.map(lambda x: x.copy(), state)
    state, _ = program.step_at(WARMUP)(state, tiny_net.rows(WARMUP))
    begun, _ = plain.step_at(WARMUP)(begun, tiny_net.rows(WARMUP))
    jax.tree.map(np.testing.assert_array_equal, state["params"], begun["params"])
    assert np.abs(state["sync"]["own"]["worker"]["up"]).max() > 0


def test_runs_that_are_resumed_within_the_warmup_and_after_it_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole = resumed_bitwise(tmp_path, powersgd(4), model=STACK)
    assert np.abs(whole.state["sync"]["own"]["worker"]["up"]).max() > 0


def test_a_warmup_as_long_as_the_run_is_refused_in_one_line(problems: Callable[..., str]) -> None:
    text = "sync.compress.warmup: of 12 steps none comes after 12 of warm-up; expected less than steps"
    assert text in problems(sync=powersgd(12))
