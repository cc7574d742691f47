"""ZeRO stages and microbatches send what theory says, and over the replicas no more often than once a step."""

from __future__ import annotations

import pytest
from selection import one_in
from test_collectives import H100, NO_COMPILER, TINY
from wire_theory import Sizes, measured
from zero_theory import ZERO, is_embedding, weights, zero_differences, zero_totals


@pytest.mark.sampled(3)
@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("name", one_in(2, ZERO))
def test_every_collective_of_a_stage_on_16_absent_h100(name: str):
    layout, changes, theory = ZERO[name]
    config, axes, rows = measured(layout, H100, **changes)
    expected = theory(Sizes.of(config, axes), config.step.microbatches)
    assert zero_differences(zero_totals(rows), {key: row for key, row in expected.items() if row[1]}) == []
    assert all(row.spans_axes and row.note == "" for row in rows)


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize(("layout", "times"), [("ddp", 2), ("zero1", 3)])
def test_replicas_talk_once_a_step_on_simulated_devices(layout: str, times: int, microbatches: int):
    """All-reduced gradients, and gathered weights; this backend never scatters what it reduces."""
    config, axes, rows = measured(layout, **TINY, step__microbatches=microbatches)
    s = Sizes.of(config, axes)
    sent = sum(row.bytes for row in rows if not is_embedding(row))
    assert sent == pytest.approx(times * s.ring("data") * weights(s), rel=0.01)
