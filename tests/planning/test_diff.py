"""Comparison of two plans: signed changes, unknown figures, the terminal and JSON."""

from __future__ import annotations

import json

import pytest
from plan_examples import FITTING, crashed, fitting, refused, simulated
from rich.console import Console

from jaxtrain.planning.report import diff
from jaxtrain.planning.result import Plan, Traffic

OTHER = fitting(
    layout="fsdp: fsdp 16", step_seconds=0.8, mfu=0.375, exposed_seconds=0.02, bubble_seconds=0.0, needs=36_000_000_000,
    memory=FITTING["memory"] | {"activations": 20_000_000_000, "host": 0},
    traffic=(Traffic("fsdp", "reduce-scatter", "InfiniBand", 50, 6_000_000_000, 0.1, 0.08),),
)  # fmt: skip


def row(name: str, section: str = "", a: Plan = fitting(), b: Plan = OTHER) -> diff.DiffRow:  # noqa: B008
    (found,) = [one for one in diff.rows(a, b) if one.name == name and one.section.startswith(section)]
    return found


def shown(a: Plan, b: Plan) -> str:
    console = Console(width=80, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(diff.report(a, b, ("a.yaml", "b.yaml")))
    return capture.get()


def test_plans_from_smaller_pods_are_marked():
    pods = ("h100:1024x8 (fsdp 64 instead of 128)", "h100:512x8 (fsdp 32 instead of 128)")
    told = fitting(pods=pods)
    assert f"extrapolated from two smaller pods: {' and '.join(pods)}" in " ".join(shown(fitting(), told).split())
    assert "extrapolated" not in shown(fitting(), OTHER)
    values = diff.as_dict(fitting(), told, ("a", "b"))
    assert (values["a"]["pods"], values["b"]["pods"]) == ([], list(pods))


def test_changes_are_signed():
    assert (row("step time").change, row("step time").is_better) == (pytest.approx(-0.2), True)
    assert row("tokens/s").relative == pytest.approx(0.25)
    assert row("MFU").is_better
    assert row("activations, temporaries").change == -4_000_000_000
    assert row("offloaded to the host").relative == -1
    assert row("fsdp reduce-scatter").relative == pytest.approx(2.0)
    assert not row("fsdp reduce-scatter").is_better
    assert (row("model all-gather").b, row("model all-gather").change) == (0, -90_000_000_000)
    assert row("total", "communication").change == -86_000_000_000
    assert row("fsdp", "communication, waiting").change == pytest.approx(0.02)
    assert row("pipeline bubble").change == pytest.approx(-0.1)


def test_figures_that_one_plan_lacks_are_unknown():
    for b in (simulated(), refused()):
        assert (row("step time", b=b).b, row("step time", b=b).change) == (None, None)
    assert row("parameters", b=refused()).b is None
    assert row("total", "memory", b=refused()).change == 89_000_000_000
    assert row("model", "communication, waiting", b=simulated()).b is None
    assert row("model all-gather", b=simulated()).change == 0
    assert "unknown" in shown(fitting(), refused())
    assert "not compiled: compiling ended with status -11" in shown(fitting(), crashed())


def test_a_device_without_communication_sends_nothing():
    alone = fitting(devices=1, traffic=(), exposed_seconds=0.0)
    assert row("model all-gather", b=alone).b == 0
    assert row("tokens/s a device", b=alone).relative == pytest.approx(15)


def test_the_same_plan_does_not_change():
    assert all(one.change == 0 for one in diff.rows(fitting(), fitting()))
    text = shown(fitting(), fitting())
    assert "same" in text
    assert "+" not in text


def test_the_terminal_and_json():
    text = shown(fitting(), OTHER)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "A  a.yaml  on h100:2x8, fsdp_tp: fsdp 2 x model 8" in text
    (line,) = [line for line in text.splitlines() if line.startswith("  activations")]
    assert line.split()[2:] == ["24.00", "20.00", "-4.00", "-16.7%"]
    values = json.loads(json.dumps(diff.as_dict(fitting(), OTHER, ("a.yaml", "b.yaml"))))
    assert values["b"]["layout"] == "fsdp: fsdp 16"
    (step,) = [one for one in values["rows"] if one["name"] == "step time"]
    assert (step["a"], step["b"], step["unit"]) == (1.0, 0.8, "seconds")
    assert step["relative"] == pytest.approx(-0.2)


def test_negligible_figures_are_left_out_of_the_terminal_only():
    tiny = Traffic("data", "all-reduce", "InfiniBand", 1, 4, 1e-6, 0.0)
    a = fitting(traffic=(*FITTING["traffic"], tiny))
    assert "data all-reduce" not in shown(a, a)
    assert row("data all-reduce", a=a, b=a).change == 0
