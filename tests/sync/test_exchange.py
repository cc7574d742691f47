"""What an exchange does to the rest of the state, what it sends, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from flax import nnx
from tiny_net import LAYOUTS, WIDTH, replicas

import jaxtrain
from jaxtrain.hlo.collectives import count_collectives
from jaxtrain.sync.local_step import combine_metrics
from jaxtrain.sync.replica_dim import average, shares
from jaxtrain.sync.strategy import StepPlan
from jaxtrain.verification.shrink import shrink

LOCAL = {"strategy": "local_sgd", "every": 2}


class Normalised(nnx.Module):
    """A layer behind a batch norm, and an integer that counts passes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.passes = nnx.Variable(jnp.zeros((), jnp.int32))

    def loss(self, batch: Any, key: Any) -> Any:
        self.passes.set_value(self.passes[...] + 1)
        return jnp.mean(jnp.square(self.head(self.norm(batch["x"])) - batch["y"]))


def test_batch_statistics_are_of_each_replica_and_averaged_at_an_exchange() -> None:
    """Numbers by hand: momentum 0.5 from 0, means over the rows of the replica."""
    model = {"type": "test_exchange:Normalised"}
    program = tiny_net.program({"replica": 2}, model=model, rules={"batch": []}, sync=LOCAL)
    state, expected = program.init(), np.zeros((2, WIDTH))
    for step in range(2):
        x = tiny_net.rows(step)["x"]
        expected = 0.5 * expected + 0.5 * np.stack([half.mean(0) for half in np.split(x, 2)])
        if step == 1:
            expected = np.broadcast_to(expected.mean(0), expected.shape)
        state, _ = program.step_at(step)(state, tiny_net.rows(step))
        np.testing.assert_allclose(state["mutable"]["norm"]["mean"], expected, atol=1e-6)
    assert state["mutable"]["passes"].tolist() == [2, 2]
    np.testing.assert_allclose(program.agreed(state)["mutable"]["norm"]["mean"], expected[0], atol=1e-6)


def test_an_average_weighs_replicas_by_their_tokens_and_does_not_read_those_of_weight_0() -> None:
    tree = {"x": jnp.array([[1.0, 2.0], [5.0, 6.0], [np.nan, np.inf]]), "n": jnp.array([3, 4, 5])}
    weights = shares(jnp.array([3.0, 1.0, 4.0]), jnp.array([True, True, False]))
    np.testing.assert_array_equal(weights, [0.75, 0.25, 0])
    found = average(tree, weights)
    np.testing.assert_array_equal(found["x"], [2.0, 3.0])
    assert int(found["n"]) == 3
    np.testing.assert_array_equal(shares(jnp.zeros(3), jnp.array([False, True, True])), [0, 0.5, 0.5])
    assert np.isnan(average(tree, shares(jnp.ones(3), jnp.zeros(3, bool)))["x"]).all()


def test_a_round_without_any_finite_replica_goes_back_to_the_outer_parameters() -> None:
    program = replicas(2, "fsdp", sync={"strategy": "diloco", "every": 2})
    state = program.init()
    outer = jax.device_get(state["sync"]["own"])
    state["params"] = jax.tree.map(lambda x: x * np.nan, state["params"])
    state, metrics = program.synchronizer.exchange(state)
    assert metrics["left_out"].tolist() == [1, 1]
    for found, before in zip(jax.tree.leaves(state["sync"]["own"]), jax.tree.leaves(outer), strict=True):
        np.testing.assert_array_equal(found, before)
    np.testing.assert_array_equal(state["params"]["a"], np.broadcast_to(outer["outer"]["a"], (2, 4, 8)))


@pytest.mark.parametrize("sync", [LOCAL, {"strategy": "diloco", "every": 2}], ids=["local_sgd", "diloco"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_local_step_sends_no_parameters_and_an_exchange_what_the_formula_says(layout: str, sync: dict) -> None:
    """Bytes of a device in the compiled programs; beside parameters only a few numbers for the metrics."""
    program = replicas(2, layout, sync=sync, optimizer={"name": "adamw"})
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tiny_net.rows(0).items()}
    step: Any = program.step
    exchange: Any = program.synchronizer._exchange_program("all")
    for compiled, expected in (
        (step.lower(program.state, batch).compile(), 0),
        (exchange.lower(program.state).compile(), program.synchronizer.sent_bytes("all")),
    ):
        found = count_collectives(compiled.as_text(), dict(program.sharder.mesh.shape))
        sent = sum(row.bytes for row in found if "replica" in row.axes)
        assert expected // 2 <= sent <= expected // 2 + 96  # a replica has two devices
    assert program.synchronizer.sent_bytes("all") == 64 * 4


class Pairs(jaxtrain.Strategy):
    """Neighbours average in turn: an exchange after every step, of two kinds."""

    def plan(self, step: int) -> StepPlan:
        return StepPlan(exchange=step % 2)

    def exchange(self, own: Any, replicas: Any, kind: Hashable) -> tuple[Any, Any]:
        partner = (jnp.arange(self.replicas) ^ 1) if kind == 0 else (jnp.arange(self.replicas) ^ 2)
        return {"rounds": own["rounds"] + 1}, jax.tree.map(lambda x: (x + x[partner]) / 2, replicas.params)

    def init(self, params: Any) -> Any:
        return {"rounds": jnp.zeros((), jnp.int32)}


class NoTree(jaxtrain.Strategy):
    def init(self, params: Any) -> Any:
        return {"name": "a text"}


class Unlike:
    pass


def test_a_strategy_of_ones_own() -> None:
    """Four replicas agree after two rounds of pairs, and another number travels along."""
    program = tiny_net.program({"replica": 4}, rules={"batch": []}, sync={"strategy": "test_exchange:Pairs"})
    state, metrics = program.init(), {}
    for step in range(2):
        state, metrics = program.step_at(step)(state, tiny_net.rows(step))
    assert int(state["sync"]["own"]["rounds"]) == 2
    assert "consensus_distance" not in metrics  # no average was sent
    a = np.asarray(state["params"]["a"])
    np.testing.assert_array_equal(a[0], a[2])
    assert np.abs(a[0] - a[1]).max() > 1e-5  # both have taken a step since they agreed


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sync": {"strategy": "dilocco"}}, "sync.strategy: expected bsp, local_sgd, post_local, diloco, "),
        ({"sync": {"strategy": "diloco", "every": 0}}, "sync.every: expected at least 1; found 0"),
        (
            {"sync": {"strategy": "diloco", "every": 5}},
            "sync.every: the last 2 of 12 steps would be in no exchange, one every 5; expected steps=10 or steps=15, "
            "or sync.every=4",
        ),
        (
            {"sync": {"strategy": "local_sgd"}, "mesh": {"replica": 1, "data": 8}},
            "sync.strategy: local_sgd averages several replicas; expected mesh.replica > 1, or diloco, which works",
        ),
        ({"sync": {"strategy": "post_local"}}, "sync.bsp_steps: post_local begins with bsp; expected at least 1"),
        (
            {"sync": {"strategy": "local_sgd"}, "rules": {"embed": "replica"}},
            "rules.embed: replicas of sync.strategy local_sgd hold parameters of their own; expected `replica` only in",
        ),
        (
            {"sync": {"strategy": "local_sgd"}, "optimizer": {"name": "optax.contrib.schedule_free_sgd"}},
            "sync.strategy: local_sgd exchanges parameters, and a schedule-free optimizer keeps others beside them",
        ),
        (
            {"sync": {"strategy": "test_exchange:Unlike"}},
            "sync.strategy: test_exchange:Unlike makes Unlike; expected a subclass of jaxtrain.Strategy",
        ),
        (
            {"sync": {"strategy": "test_exchange:NoTree"}},
            "sync.strategy: test_exchange:NoTree: its `init` returns own['name'] of type str; expected a dict",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value["sync"].values())),
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(changes: dict[str, Any], text: str, problems: Callable[..., str]) -> None:
    assert text in problems(**changes)


def test_plan_says_what_an_exchange_sends_and_its_search_is_of_bsp(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(tiny_net.__file__))  # of the process that compiles
    run = tiny_net.config(simulate=8, mesh={"replica": 2, "data": 2, "fsdp": 2}, sync=LOCAL, dir=str(tmp_path))
    plan = jaxtrain.plan(run, "simulate:8")
    note = next(line for line in plan.notes if "exchange" in line)
    expected = "in an exchange of local_sgd a device sends 6.4e-05 MB, every 2 steps (3.2e-05 MB a step)"  # 256 B of 4
    assert note == f"{expected}; its time is not in that of the step"
    assert not any("replica" in row.axes and row.bytes > 96 for row in plan.traffic)
    slow = next(row for row in jaxtrain.plan(run, "simulate:8", dcn="1Mbit").traffic if row.op == "exchange")
    assert (slow.axes, slow.network, slow.bytes, slow.hidden) == ("replica", "1Mbit", 32, 0.0)  # 64 B every 2 steps
    assert slow.seconds == pytest.approx(4 * 64 / (1e6 / 8) / 2)  # of 4 devices that share the link
    with pytest.raises(jaxtrain.UserError, match="the search estimates bsp, not local_sgd; expected bsp"):
        jaxtrain.search(run, target="simulate:8")
    small, _ = shrink(run, 8)
    assert small.sync.strategy == "bsp"


def test_metrics_of_a_step_are_means_by_tokens_without_replicas_that_are_not_finite() -> None:
    metrics = {
        "loss": [1.0, 3.0, np.nan], "grad_norm": [2.0, 6.0, np.nan], "tokens": [3.0, 1.0, 4.0], "lr": [0.5, 0.5, 0.5],
        "skipped": [0.0, 0.0, 1.0], "loss_scale": [8.0, 4.0, 2.0], "spike": [1.0, 2.0, 9.0],
    }  # fmt: skip
    found = combine_metrics({name: jnp.array(values) for name, values in metrics.items()})
    expected = {
        "loss": 1.5, "grad_norm": 3.0, "tokens": 8, "lr": 0.5, "skipped": 0, "loss_scale": 2, "spike": 9,
        "skipped_replicas": 1,
    }  # fmt: skip
    assert {name: float(value) for name, value in found.items()} == expected
    broken = combine_metrics({name: jnp.array(values)[2:] for name, values in metrics.items()})
    assert np.isnan(broken["loss"])
    assert broken["skipped"] == 1


def test_a_replica_that_was_left_out_takes_the_largest_loss_scale_and_keeps_its_finite_moments() -> None:
    program = replicas(2, "fsdp", sync=LOCAL, precision="fp16", optimizer={"name": "adamw"})
    state = program.init()

    def scaling(*scales: float) -> dict[str, jax.Array]:
        values = {"scale": jnp.array(scales), "good": jnp.array([7, 0], jnp.int32)}
        return {name: jax.device_put(value, state["scaling"][name].sharding) for name, value in values.items()}

    state["scaling"] = scaling(8.0, 8.0)  # the gradients overflow with the first one
    state, _ = program.step(state, tiny_net.rows(0))
    moments = [np.array(leaf) for leaf in jax.tree.leaves(state["opt_state"])]
    state["scaling"] = scaling(64.0, 1.0)
    state["params"] = {**state["params"], "b": state["params"]["b"].at[1].set(np.nan)}
    broken = jax.tree.map(lambda x: x.at[1, 0, 0].set(np.inf) if x.ndim == 3 else x, state["opt_state"])
    state, metrics = program.synchronizer.exchange({**state, "opt_state": broken})
    assert metrics["left_out"].tolist() == [0, 1]
    assert state["scaling"]["scale"].tolist() == [64, 64]
    for leaf, expected in zip(jax.tree.leaves(state["opt_state"]), moments, strict=True):
        if expected.ndim == 3:
            assert np.abs(expected[1]).max() > 0
            expected[1, 0, 0] = 0
        np.testing.assert_array_equal(leaf, expected)
    np.testing.assert_array_equal(state["params"]["b"][0], state["params"]["b"][1])
