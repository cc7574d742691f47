"""Gradients that each replica computes: their mean is that of bsp, and a strategy may combine them in another way."""

from __future__ import annotations

from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from tiny_net import LAYOUTS, replicas, run

import jaxtrain
from jaxtrain.sync.replica_dim import spread

MEAN = {"strategy": "test_replica_gradients:Mean"}
ADAM = {"name": "adamw", "lr": 0.02, "weight_decay": 0.1, "grad_clip_norm": 0.1, "ema_decay": 0.9}
EXPERTS = {"moe": {"num_experts": 4, "top_k": 2}, "sliding_window": None, "sliding_window_pattern": 1}


class Mean(jaxtrain.Strategy):
    """The mean of the gradients; counts steps, and shows the tokens of each replica."""

    parameters_differ = False
    combines_gradients = True

    def init(self, params: Any) -> Any:
        return {"count": jnp.zeros((), jnp.int32)}

    def combine(self, own: Any, gradients: Any, tokens: Any) -> Any:
        own, mean, _ = super().combine(own, gradients, tokens)
        return {"count": own["count"] + 1}, mean, {"tokens_of": tokens}


class Stale(Mean):
    """Replica 1 computes its gradients at the parameters of the step before."""

    def init(self, params: Any) -> Any:
        return {"read": spread(params, self.replicas)}

    def read(self, own: Any, params: Any) -> Any:
        read = jax.tree.map(lambda p, old: jnp.stack([p, old[0]]), params, own["read"])
        return {"read": spread(params, self.replicas)}, read

    def combine(self, own: Any, gradients: Any, tokens: Any) -> Any:
        return jaxtrain.Strategy.combine(self, own, gradients, tokens)


class Apart(Mean):
    """Shows how far the gradients of two replicas are from each other."""

    def combine(self, own: Any, gradients: Any, tokens: Any) -> Any:
        own, mean, _ = super().combine(own, gradients, tokens)
        return own, mean, {"apart": jnp.abs(gradients["a"][0] - gradients["a"][1]).max()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_mean_of_the_gradients_of_replicas_is_that_of_bsp(layout: str, microbatches: int) -> None:
    """With uneven tokens: each replica's gradients have the weights of the terms over all rows."""
    changes = {"optimizer": ADAM, "step": {"microbatches": microbatches}}
    (state, ours), (plain_state, plain) = (
        run(replicas(2, layout, sync=sync, **changes), 6, weights="uneven") for sync in (MEAN, {})
    )
    for found, expected in zip(ours, plain):
        harness.close_trees(expected["params"], found["params"], 1e-6)
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-5)
    tokens = [half.sum() for half in np.split(tiny_net.rows(5, weights="uneven")["w"], 2)]
    assert ours[5]["metrics"]["tokens_of"].tolist() == tokens
    assert tokens[0] != tokens[1]
    assert int(state["sync"]["own"]["count"]) == 6
    assert {name: jax.tree.map(np.shape, state[name]) for name in plain_state} == jax.tree.map(np.shape, plain_state)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_terms_that_look_at_other_rows_are_of_all_replicas(microbatches: int) -> None:
    """The balance of experts, of which the model has statistics; the rows of a replica are split over `data`."""
    found = []
    for sync in (MEAN, {}):
        changes = {"model": EXPERTS, "sync": sync, "step": {"microbatches": microbatches}}
        program = harness.program({"replica": 2, "data": 2}, harness.RULES, **changes)
        state, metrics = program.init(), {}
        for step in range(2):
            state, metrics = program.step_at(step)(state, harness.placed(program, step))
        found.append(jax.device_get((state["params"], {"loss": metrics["loss"]})))
    harness.close_trees(found[1][0], found[0][0], 1e-5)
    assert found[0][1]["loss"] == pytest.approx(found[1][1]["loss"], rel=1e-5)


def test_replicas_may_compute_gradients_at_parameters_of_their_own() -> None:
    """SGD by hand: replica 1 is one step late."""
    sync = {"strategy": "test_replica_gradients:Stale"}
    program = replicas(2, "tp", sync=sync, optimizer={"name": "sgd", "lr": 0.1})
    state, history = run(program, 3)
    one = tiny_net.program({})
    params = before = one.init()["params"]
    for step in range(3):
        halves = [{n: v[i * 8 : i * 8 + 8] for n, v in tiny_net.rows(step).items()} for i in range(2)]
        at = (params, before)
        grads = [one.gradients(p, half, jax.random.key(0)).grads for p, half in zip(at, halves, strict=True)]
        before, params = params, jax.tree.map(lambda p, g, h: p - 0.1 * (g + h) / 2, params, *grads)
        harness.close_trees(params, history[step]["params"], 1e-5)
    np.testing.assert_array_equal(state["sync"]["own"]["read"]["a"][1], history[1]["params"]["a"])


def test_a_step_that_is_skipped_leaves_what_the_strategy_keeps() -> None:
    program = replicas(2, "fsdp", sync=MEAN, debug={"faults": [{"kind": "nan", "step": 2}]})
    state, history = run(program, 3)
    assert [float(h["metrics"]["skipped"]) for h in history] == [0, 1, 0]
    assert int(state["sync"]["own"]["count"]) == 2
    np.testing.assert_array_equal(history[0]["params"]["a"], history[1]["params"]["a"])


def test_replicas_have_noise_of_their_own() -> None:
    sync = {"strategy": "test_replica_gradients:Apart"}
    for noise, differ in ((0.5, True), (0.0, False)):
        program = replicas(2, "fsdp", sync=sync, model={"type": "tiny_net:Net", "options": {"noise": noise}})
        _, history = run(program, 1, equal=2)
        assert (history[0]["metrics"]["apart"] > 1e-3) == differ


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "sync"),
    [({"replica": 2}, MEAN), ({"data": 2}, {"compress": {"gradients": "topk", "share": 1.0}})],
    ids=["replica", "data"],
)
def test_a_pipeline_inside_a_replica(mesh: dict[str, int], sync: dict[str, Any]) -> None:
    """Its stages see one part of the batch; weights are of the whole."""
    model = {"sliding_window": None, "sliding_window_pattern": 1}
    rules = {**harness.RULES, "layers": ["pipeline"]}
    found = []
    for each in (sync, {}):
        changes = {"model": model, "sync": each, "step": {"microbatches": 2}}
        program = harness.program({**mesh, "pipeline": 2}, rules, **changes)
        state, metrics = program.step(program.init(), harness.placed(program, 0))
        found.append(jax.device_get((state["params"], {"loss": metrics["loss"]})))
    harness.close_trees(found[1], found[0], 1e-5)
