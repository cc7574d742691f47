"""Advice to let replicas agree less often, against sums worked out by hand and against plans of the advised config."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plan_examples import AXES, fitting
from test_roofline import NO_COMPILER, TINY
from wire_theory import configured

from jaxtrain.config.schema import Config
from jaxtrain.planning import advice, compile
from jaxtrain.planning.assess import assess
from jaxtrain.planning.hardware import calibration, chips
from jaxtrain.planning.report import values
from jaxtrain.planning.result import Advice, Plan, Traffic

REPLICAS = {"replica": 2, "fsdp": 8}
GB = 10**9


def config_of(*, mesh: dict[str, int] = REPLICAS, layout: str = "fsdp", **keys: Any) -> Config:
    return configured(layout, mesh, {"step.remat": "none", "steps": 1024, "precision": "bf16"} | keys)


def row(seconds: float, axes: str = "replica", op: str = "all-reduce", hidden: float = 0.0, size: int = GB) -> Traffic:
    return Traffic(axes, op, "10Gbit", 1, size, seconds, hidden)


def waiting(*rows: Traffic, **changes: Any) -> Plan:
    """A step of which 1 s is not traffic, with 10 GB of float32 parameters and 1.25 GB/s between replicas."""
    exposed = sum(each.exposed for each in rows)
    known = {
        "sizes": AXES | REPLICAS, "traffic": rows, "exposed_seconds": exposed, "step_seconds": 1 + exposed,
        "bubble_seconds": 0.0, "tree_bytes": {"params": 10 * GB, "gradients": 10 * GB, "mutable": 0},
        "replica_rate": 1.25e9,
    }  # fmt: skip
    return fitting(**known | changes)


def of_sync(config: Config, plan: Plan) -> list[Advice]:
    return [one for one in advice.suggest(config, plan) if one.change.startswith("sync.")]


def test_bsp_that_waits_for_replicas_could_be_diloco():
    (one,) = of_sync(config_of(), waiting(row(9.5, hidden=0.5)))
    # A replica sends 10 GB around the ring of two, which takes 8 s: a 64th of it waits for 0.125 s of 1.125, which is
    # more than a tenth; a 256th for 0.03125 s.
    assert one.change == "sync.strategy=diloco sync.every=256"
    assert one.gain == pytest.approx(10 / 1.03125 - 1)
    assert "9 s of a step wait for other replicas, then 0.0312 s" in one.why
    assert one.why.endswith("so the loss is not that of bsp")


def test_the_least_loose_round_with_a_small_wait():
    fast = waiting(row(9.0), replica_rate=8e9)  # 1.25 s
    assert of_sync(config_of(), fast)[0].change == "sync.strategy=diloco sync.every=16"
    (one,) = of_sync(config_of(steps=1000), fast)
    assert one.change == "sync.strategy=diloco sync.every=16 steps=1008"  # an exchange follows the last step


def test_parameters_in_two_bytes_are_sent_in_float32():
    slow, halved = waiting(row(9.0)), {"params": 5 * GB, "gradients": 5 * GB, "mutable": 0}
    pure = waiting(row(9.0), tree_bytes=halved)
    assert of_sync(config_of(precision="bf16_pure"), pure) == of_sync(config_of(), slow)


def test_no_rarer_exchanges_without_a_long_wait_or_room():
    assert not of_sync(config_of(), waiting(row(0.1)))  # 9% of a step
    assert not of_sync(config_of(), waiting(row(9.0), replica_rate=None))
    memory = {"params": 18 * GB}  # two copies more are 36 GB; 39 are free
    assert of_sync(config_of(), waiting(row(9.0), memory=memory))
    assert not of_sync(config_of(), waiting(row(9.0), memory={"params": 19 * GB}))


def test_what_joins_replicas_and_others_still_takes_the_time_of_the_others():
    (one,) = of_sync(config_of(), waiting(row(9.0, "replica+fsdp", size=30 * GB), crosses={"fsdp": True}))
    card = float(chips.CHIPS["h100"].outside.bandwidth) * calibration.calibration_of("h100").outside
    inner = 30 * GB / card
    assert one.change.endswith("every=64")  # of 1 + inner seconds, 0.125 is less than a tenth
    assert one.gain == pytest.approx(10 / (1 + inner + 0.125) - 1)
    unknown = waiting(row(9.0, "replica+fsdp"), target="simulate:16", device="cpu")
    assert not of_sync(config_of(), unknown)


def test_exchanges_that_are_not_rare_enough():
    diloco = config_of(**{"sync.strategy": "diloco", "sync.every": 16})
    exchange = row(0.5, op="exchange")  # 8 s an exchange
    (one,) = of_sync(diloco, waiting(exchange, row(0.2)))
    assert one.change == "sync.every=64"  # 0.125 s of 1.325
    assert one.gain == pytest.approx(1.7 / (1.2 + 8 / 64) - 1)
    assert one.why.endswith("so the loss is not that of diloco, every 16")
    often = config_of(**{"sync.strategy": "diloco", "sync.every": 512})
    assert not of_sync(often, waiting(exchange))
    # Of streaming_diloco a part is hidden.
    hides = waiting(row(0.5, op="exchange", hidden=0.25))
    streaming = config_of(**{"sync.strategy": "streaming_diloco", "sync.every": 16})
    assert of_sync(streaming, hides)[0].gain == pytest.approx(1.25 / (1 + 4 / 64) - 1)
    local = config_of(**{"sync.strategy": "local_sgd", "sync.every": 16, "steps": 1000})
    assert of_sync(local, waiting(exchange))[0].change == "sync.every=256"
    assert not of_sync(config_of(**{"sync.strategy": "ssp"}), waiting(row(9.0)))


def test_the_compiler_hides_no_exchange(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    diloco = config_of(**{"sync.strategy": "diloco", "sync.every": 256})
    exchange = row(0.3, op="exchange", hidden=0.1)

    def flag(*rows: Traffic) -> list[Advice]:
        return [one for one in advice.suggest(diloco, waiting(*rows)) if advice.LATENCY_HIDING in one.change]

    assert not flag(exchange)
    (both,) = flag(exchange, row(0.05, "fsdp"))
    assert "0.05 s a step of sending weights and gradients are exposed, 0.05 s could be hidden" in both.why


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "layout", "mesh"),
    [
        ("simulate:4", "fsdp", {"replica": 2, "fsdp": 2}),
        pytest.param(
            "h100:2x4", "ddp", {"replica": 2, "data": 4},
            marks=pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER)),
        ),
    ],
)  # fmt: skip
def test_the_gain_is_that_of_the_advised_plan(target: str, layout: str, mesh: dict[str, int]):
    """The gradients of ddp are reduced over both axes at once, those of fsdp over the replicas alone."""
    attention = "reference" if target.startswith("simulate") else "xla"

    def planned(**keys: Any) -> tuple[Config, compile.CompileReport, Plan]:
        changes = TINY | {"data.global_batch": 32, "step.attention": attention} | keys
        config = config_of(mesh=mesh, layout=layout, **changes)
        report = compile.compile_report(config, None, target)
        if report.cpu_rates:  # measured anew each time
            report = dataclasses.replace(report, cpu_rates=None, target="local", device_kind="NVIDIA H100 80GB HBM3")
        return config, report, assess(config, report, "100Mbit")

    config, _, plan = planned()
    (one,) = of_sync(config, plan)
    _, report, better = planned(**dict(word.split("=") for word in one.change.split()))
    assert plan.tokens_per_second
    assert better.tokens_per_second
    assert plan.tokens_per_second * (1 + one.gain) == pytest.approx(better.tokens_per_second, rel=0.1)
    # Diloco keeps the parameters and a velocity in float32.
    assert better.memory["sync"] == pytest.approx(2 * better.memory["params"], rel=0.01)
    assert (better.memory["optimizer"], plan.memory["sync"]) == (plan.memory["optimizer"], 0)
    named = {name: size for _, name, size in values.memory_rows(better)}
    assert named["synchronisation"] == report.state_bytes["sync"]
    waits = {each.name for each in values.time_parts(plan) if each.group == "communication"}
    assert f"waiting for {'axis replica' if layout == 'fsdp' else 'axes replica+data'}" in waits
