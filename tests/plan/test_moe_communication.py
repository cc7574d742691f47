"""Mixtures of experts send tokens and weights as theory says, and no sums but scalars and [layers, experts]."""

from __future__ import annotations

import pytest
from moe_theory import MOE_LAYOUTS, Experts, layers, merged, moe_differences
from test_communication import H100, NO_COMPILER
from wire_theory import measured, totals, tp_sp


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("name", MOE_LAYOUTS)
def test_every_collective_of_experts_on_16_absent_h100(name: str):
    layout, capacity, theory = MOE_LAYOUTS[name]
    config, axes, rows = measured(layout, H100, **layers(capacity))
    expected = {key: row for key, row in theory(Experts.of(config, axes)).items() if row[1]}
    assert moe_differences(merged(totals(rows)), expected) == []
    assert all(row.whole and (row.note == "" or row.op == "ragged-all-to-all") for row in rows)


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.xfail(strict=True, reason="members gather whole receive buffers: all that could come, not what came")
def test_members_of_a_dropless_expert_gather_what_is_routed():
    """Those that share each expert's width hand each other an even share of the choices, besides the stream."""
    config, axes, rows = measured("ep_tp", H100, **layers(None))
    e = Experts.of(config, axes)
    s = e.dense
    stream = sum(size for (op, over, _), (_, size) in tp_sp(s).items() if over == "model" and op != "all-reduce")
    choices = s.tokens * s.axes["model"] * e.top_k * s.embed * s.width
    sent = sum(row.bytes for row in rows if row.axes == ("model",) and row.op != "all-reduce")
    assert sent <= 1.02 * (stream + 6 * s.layers * s.ring("model") * choices)
