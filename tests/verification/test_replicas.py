"""`jaxtrain verify` compares the strategy of `sync` on layouts inside a replica, and equal replicas with one."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import tiny_net

import jaxtrain
from jaxtrain.config import UserError
from jaxtrain.verification.outcome import LayoutResult, Outcome

STRATEGIES = {
    "local_sgd": {"strategy": "local_sgd", "every": 3},
    "post_local": {"strategy": "post_local", "every": 2, "bsp_steps": 100},
    "diloco": {"strategy": "diloco", "every": 500, "outer": {"lr": 0.7, "momentum": 0.9}},
    "int4": {"strategy": "diloco", "every": 2, "compress": {"deltas": "int4"}},
    "streaming": {"strategy": "streaming_diloco", "every": 500, "streaming": {"fragments": 2, "tau": 2}},
    "ssp": {"strategy": "ssp", "stale": {"bound": 2}},
    "powersgd": {"strategy": "bsp", "compress": {"gradients": "powersgd"}},
    "onebit_adam": {"strategy": "bsp", "compress": {"gradients": "onebit_adam"}},
    "gossip": {"strategy": "gossip", "every": 1, "gossip": {"graph": "ring"}},
}
EQUAL = ("local_sgd", "post_local", "diloco", "streaming", "gossip")  # keep equal replicas one


class Grows(jaxtrain.Strategy):
    """Says that equal replicas stay one, and makes them larger."""

    keeps_equal_replicas, min_replicas = True, 2

    def exchange(self, own: Any, replicas: Any, kind: Any) -> Any:
        own, new = super().exchange(own, replicas, kind)
        return own, jax.tree.map(lambda x: 1.1 * x, new)


def verify(sync: dict[str, Any], layouts: list[str], mesh: Any = None, **changes: Any) -> Outcome:
    config = tiny_net.config(
        mesh=mesh or {"replica": 2, "fsdp": -1}, layout="fsdp", sync=sync, steps=500,
        data={"type": "tiny_net:Rows", "global_batch": 16, "options": {"weights": "uneven"}}, **changes,
    )  # fmt: skip
    return jaxtrain.verify(config, layouts=layouts)


def of_strategy(outcome: Outcome) -> dict[str, LayoutResult]:
    found = {row.candidate.layout.partition(": ")[::2]: row for row in outcome.rows}
    return {what: row for (name, what), row in found.items() if what}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_are_equal_on_every_layout(name: str):
    outcome = verify(STRATEGIES[name], ["fsdp", "tp"], optimizer={"name": "adamw", "lr": 0.01})
    assert outcome.is_equal, [row for row in outcome.rows if not row.is_equal]
    rows = of_strategy(outcome)
    assert set(rows) == {"fsdp", "tp"} | ({"equal rows"} if name in EQUAL else set())
    assert all("an exchange sends" in row.collectives for row in rows.values())
    assert any("replicas of one device each" in note for note in outcome.notes)
    assert rows["tp"].candidate.mesh == "replica 2 x fsdp 2 x model 2"


def test_gradients_that_travel_over_data_are_equal_on_every_layout():
    outcome = verify(STRATEGIES["powersgd"], ["ddp", "fsdp", "tp", "zero1"], mesh={"data": -1})
    assert outcome.is_equal, [row for row in outcome.rows if not row.is_equal]
    rows = of_strategy(outcome)
    assert {name: row.candidate.mesh for name, row in rows.items()} == {
        "fsdp": "data 2 x fsdp 4", "tp": "data 2 x fsdp 2 x model 2"
    }  # fmt: skip


def test_a_strategy_that_does_not_keep_equal_replicas_is_found():
    rows = of_strategy(verify({"strategy": "test_replicas:Grows", "every": 2}, ["fsdp"]))
    assert not rows["equal rows"].is_equal
    assert rows["fsdp"].is_equal


def test_a_fault_in_the_layout_of_a_replica_is_found():
    config = tiny_net.config(mesh={"replica": 2, "fsdp": -1}, sync=STRATEGIES["local_sgd"])
    rows = of_strategy(jaxtrain.verify(config, layouts=["ddp"], inject="missing-reduction"))
    assert not rows["ddp"].is_equal


def test_plain_training_has_no_rows_of_a_strategy():
    assert not of_strategy(verify({}, ["fsdp"]))


def test_too_few_devices_for_the_replicas():
    with pytest.raises(UserError, match=r"5 replicas cannot share 8 devices; expected --simulate 10"):
        jaxtrain.verify(tiny_net.config(mesh={"replica": 5}, sync=STRATEGIES["diloco"]), layouts=["fsdp"])
