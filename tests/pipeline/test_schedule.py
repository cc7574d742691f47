"""Every shipped schedule is one, and has the ticks, bubbles and memory of its paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_reference import faults, peak_activations, simulate

from jaxtrain.errors import ScheduleError
from jaxtrain.pipeline.schedules.cost import Costs, schedule_cost
from jaxtrain.pipeline.schedules.shipped import SCHEDULES, shipped_table
from jaxtrain.pipeline.schedules.table import Action, Task
from jaxtrain.pipeline.schedules.timetable import build_table
from jaxtrain.pipeline.schedules.validate import check_table

stages, microbatches = st.integers(1, 9), st.integers(1, 20)
costs = st.builds(Costs, *[st.integers(1, 6)] * 3)


@st.composite
def tables(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = draw(st.integers(1, 4)) if name == "interleaved_1f1b" else None
    return shipped_table(name, draw(stages), draw(microbatches), chunks)


@settings(max_examples=150)
@given(tables())
def test_every_microbatch_passes_every_stage_once_each_way(table):
    assert faults(table) == []
    check_table(table)


@settings(max_examples=100)
@given(tables(), costs)
def test_costs_are_those_of_a_simulation(table, costs):
    figures = schedule_cost(table, costs)
    assert (figures.makespan, figures.longest_stage) == pytest.approx(simulate(table, costs))
    assert (figures.peak * table.chunks).tolist() == peak_activations(table)
    slowest = {Action.IDLE: 0, Action.F: costs[0], Action.B: costs[1], Action.W: costs[2], Action.BW: sum(costs[1:])}
    assert figures.lockstep * table.chunks == pytest.approx(sum(max(slowest[a] for a in row) for row in table.action))
    assert figures.work == pytest.approx(sum(costs) * table.microbatches)


def test_bubbles_by_hand():
    figures = schedule_cost(shipped_table("1f1b", 4, 8), Costs(1, 1, 1))
    assert (figures.work, figures.makespan, figures.lockstep) == (24, 33, 40)  # 4 ticks of F alone, 18 with a backward
    assert figures.bubble == pytest.approx(9 / 33)
    assert figures.lockstep_bubble == pytest.approx(16 / 40)
    figures = schedule_cost(shipped_table("zb_v", 4, 8), Costs(1, 1, 1))
    assert (figures.makespan, figures.longest_stage, figures.longest_bubble, figures.sends) == (25.5, 24, 0, 96)


@settings(max_examples=60)
@given(stages, microbatches, costs)
def test_gpipe(p, m, costs):
    figures = schedule_cost(shipped_table("gpipe", p, m), costs)
    assert figures.ticks == 2 * (m + p - 1)
    assert figures.makespan - figures.work == figures.lockstep - figures.work == (p - 1) * sum(costs)
    assert set(figures.peak) == {m}


@settings(max_examples=60)
@given(stages, microbatches, costs)
def test_1f1b(p, m, costs):
    figures = schedule_cost(shipped_table("1f1b", p, m), costs)
    assert figures.ticks == 2 * (m + p - 1)
    assert figures.makespan - figures.work == (p - 1) * sum(costs)
    assert figures.peak.tolist() == [min(m, p - s) for s in range(p)]


@settings(max_examples=60)
@given(stages, microbatches, costs)
def test_aligned_1f1b_has_its_bubble_in_lockstep_too(p, m, costs):
    figures = schedule_cost(shipped_table("1f1b_aligned", p, m), costs)
    assert figures.ticks == 2 * (m + p - 1)
    assert figures.lockstep - figures.work == figures.makespan - figures.work == (p - 1) * sum(costs)
    assert figures.peak.tolist() == [min(m, 2 * (p - s) - 1) for s in range(p)]


@settings(max_examples=60)
@given(stages, st.integers(1, 4), st.integers(1, 4), costs)
def test_interleaved(p, rounds, v, costs):
    m = rounds * p
    figures = schedule_cost(shipped_table("interleaved_1f1b", p, m, v), costs)
    assert figures.makespan - figures.work == pytest.approx((p - 1) * sum(costs) / v)
    assert figures.lockstep == pytest.approx(figures.makespan)
    assert figures.peak * v == pytest.approx([min(m * v, 2 * (p - 1 - s) + (v - 1) * p + 1) for s in range(p)])
    assert figures.peak.max() <= p + (p - 1) / v + 1e-9


@settings(max_examples=60)
@given(stages, microbatches, st.integers(2, 4))
def test_interleaved_takes_any_number_of_microbatches(p, m, v):
    """A last round that is not full costs no more than a full one."""
    part, full = (schedule_cost(shipped_table("interleaved_1f1b", p, count, v)) for count in (m, -(-m // p) * p))
    assert part.ticks <= full.ticks
    assert part.lockstep <= full.lockstep
    assert (part.peak <= full.peak).all()


@settings(max_examples=60)
@given(stages, st.integers(0, 20), costs)
def test_zb_h1(p, more, costs):
    m = p + more
    figures = schedule_cost(shipped_table("zb_h1", p, m), costs)
    assert figures.ticks == 3 * m + p - 1
    assert set(figures.peak) == {p}
    forward, backward, weight = costs
    # The paper's bubble, for W no costlier than F and B; else the way to the last stage and back takes longer.
    assert figures.makespan - figures.work == (p - 1) * max(forward + backward - weight, forward, backward)


@settings(max_examples=60)
@given(stages, st.integers(0, 20))
def test_zb_v(p, more):
    m = p + more
    figures = schedule_cost(shipped_table("zb_v", p, m))
    assert figures.ticks == 6 * m + p - 1  # the last stage starts p - 1 ticks late and never waits
    assert set(figures.peak) == {p}
    assert figures.longest_stage == (3 * m if m >= 2 * p - 1 else figures.longest_stage)
    assert figures.longest_stage <= 3 * m + (p - 1) / 2


@settings(max_examples=60)
@given(stages, st.integers(0, 20))
def test_v_half(p, more):
    m = p + more
    figures = schedule_cost(shipped_table("v_half", p, m))
    assert figures.ticks == 6 * m + 3 * p - 3 - (p % 2 == 1 and p > 1)
    assert figures.peak.max() == (p + 2) // 2 if m > 1 else 1
    assert figures.bubble <= p / (2 * m)  # the paper's


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "v_half"])
@pytest.mark.parametrize("p", [12, 24])
def test_large_pipelines(name, p):
    for m in (1, p - 1, 2 * p + 1):
        table = shipped_table(name, p, m)
        assert faults(table) == []
        assert schedule_cost(table).peak.max() <= {"zb_h1": p, "zb_v": p, "v_half": (p + 2) // 2}[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zbv", 4, 8), "did you mean `zb_v`"),
        (("pipedream", 4, 8), "expected gpipe, 1f1b"),
        (("1f1b", 0, 8), "stages: expected at least 1; found 0"),
        (("1f1b", 4, 0), "microbatches: expected at least 1; found 0"),
        (("1f1b", 4, 8, 2), "chunks: expected 1; found 2"),
        (("zb_v", 4, 8, 3), "chunks: expected 2; found 3"),
        (("interleaved_1f1b", 4, 8, 0), "chunks: expected at least 1"),
    ],
)
def test_unsupported_numbers_are_refused(arguments, message):
    with pytest.raises(ScheduleError, match=message) as error:
        shipped_table(*arguments)
    assert "\n" not in str(error.value)


def test_orders_that_deadlock():
    step = {name: Task(Action.F if name[0] == "F" else Action.BW, int(name[1])) for name in ("F0", "B0", "F1", "B1")}
    orders = [[step[name] for name in row.split()] for row in ("F0 B0 F1 B1", "F1 F0 B0 B1")]
    with pytest.raises(ValueError, match="deadlock at tick 1: stage 0 waits"):
        build_table(orders, name="own", placement="loop", microbatches=2, chunks=1)
