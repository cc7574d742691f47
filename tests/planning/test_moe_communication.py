"""Mixtures of experts send tokens and weights as theory says, and no sums but scalars and [layers, experts]."""

from __future__ import annotations

import pytest
from moe_theory import MOE_LAYOUTS, Experts, layers, merged, moe_differences
from selection import one_in
from test_collectives import H100, NO_COMPILER
from wire_theory import measured, totals


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("name", one_in(2, MOE_LAYOUTS))
def test_every_collective_of_experts_on_16_absent_h100(name: str):
    layout, capacity, theory = MOE_LAYOUTS[name]
    config, axes, rows = measured(layout, H100, **layers(capacity))
    expected = {key: row for key, row in theory(Experts.of(config, axes)).items() if row[1]}
    assert moe_differences(merged(totals(rows)), expected) == []
    assert all(row.spans_axes and (row.note == "" or row.op == "ragged-all-to-all") for row in rows)
