"""What must hold between strategies, with the conditions without which it does not, on two layouts of a replica."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from tiny_net import LAYOUTS, replicas, run, with_one_key

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.sync.replica_dim import spread
from jaxtrain.sync.strategies import DiLoCo
from jaxtrain.sync.strategy import Replicas

PLAIN_OUTER = {"lr": 1.0, "momentum": 0.0}
ADAM = {
    "optimizer": {"name": "adamw", "lr": 0.02, "weight_decay": 0.1, "grad_clip_norm": 0.5, "ema_decay": 0.9},
    "model": {"options": {"noise": 0.1}},
    "schedule": {"name": "cosine", "warmup_steps": 2},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def assert_equal_bits(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def difference(a: Any, b: Any) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@layouts
def test_one_replica_whose_average_is_copied_trains_as_without_a_strategy(layout: str) -> None:
    """Bit for bit, through exchanges, with Adam, clipping, decay, a schedule, an average of weights and noise."""
    sync = {"strategy": "diloco", "every": 3, "outer": PLAIN_OUTER}
    state, loose = run(replicas(1, layout, sync=sync, steps=6, **ADAM), 6)
    plain_state, plain = run(tiny_net.program(LAYOUTS[layout], steps=6, **ADAM), 6)
    assert "consensus_distance" in loose[2]["metrics"]
    for ours, theirs in zip(loose, plain):
        assert_equal_bits(ours["params"], theirs["params"])
        assert_equal_bits(ours["metrics"]["loss"], theirs["metrics"]["loss"])
    assert_equal_bits({name: state[name] for name in plain_state}, plain_state)


@layouts
def test_one_replica_with_an_outer_optimizer_is_within_an_ulp_of_its_formula(layout: str) -> None:
    """Right after each exchange, against float64 from the parameters before it."""
    every, lr, momentum = 2, 0.7, 0.9
    sync = {"strategy": "diloco", "every": every, "outer": {"lr": lr, "momentum": momentum}}
    program = replicas(1, layout, sync=sync, optimizer={"lr": 0.001})  # changes are small beside the parameters
    state, velocity = program.init(), 0.0
    for step in range(6):
        old = jax.device_get(state["sync"]["own"]["outer"])["a"]
        batch = tiny_net.rows(step)
        if (step + 1) % every:
            state, _ = program.step_at(step)(state, batch)
            continue
        local, _ = program.step(state, batch)
        inner = np.float64(np.asarray(local["params"]["a"]))
        before = np.float64(np.asarray(local["sync"]["own"]["velocity"]["a"]))
        state, _ = program.synchronizer.exchange(local)
        delta = np.float64(old) - inner
        velocity = momentum * before + delta
        expected = np.float64(old) - lr * (delta + momentum * velocity)
        found = np.asarray(state["params"]["a"])
        ulp = np.spacing(np.maximum(np.abs(old), np.abs(found)).astype(np.float32))
        assert np.all(np.abs(found - expected) <= ulp)
        assert np.abs(found - inner).max() > 1e-5  # it is not the plain average


@layouts
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_with_the_same_rows_and_keys_are_one(layout: str, count: int) -> None:
    """A power of two of them, for any inner optimizer."""
    sync = {"strategy": "diloco", "every": 2}
    both = []
    for number in (1, count):
        program = replicas(number, layout, sync=sync, data={"global_batch": 4 * number}, **ADAM)
        state = program.init() if number == 1 else with_one_key(program)
        both.append(run(program, 4, state, equal=number, total=4 * number)[1])
    for one, many in zip(*both):
        assert_close(one["agreed"], many["agreed"])
        for leaf in jax.tree.leaves(many["params"]):
            assert_equal_bits(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    for one in both[1][1::2]:
        assert one["metrics"]["consensus_distance"] < 1e-6


def test_replicas_draw_different_noise() -> None:
    program = replicas(2, "fsdp", sync={"strategy": "local_sgd", "every": 4}, **ADAM)
    keys = np.asarray(program.init()["rng"])
    assert np.any(keys[0] != keys[1])
    assert_equal_bits(keys[0], tiny_net.program(LAYOUTS["fsdp"], **ADAM).init()["rng"])
    _, history = run(program, 1, equal=2)
    assert difference(history[0]["params"]["a"][0], history[0]["params"]["a"][1]) > 1e-4


def every_step_and_data_parallel(layout: str, **changes: Any) -> float:
    """Largest difference of the parameters between an average after every step, and a reduction of gradients."""
    weights = changes.pop("weights", "even")
    local = run(replicas(2, layout, sync={"strategy": "local_sgd", "every": 1}, **changes), 4, weights=weights)[1]
    joint = run(replicas(2, layout, **changes), 4, weights=weights)[1]
    return max(difference(ours["agreed"], theirs["params"]) for ours, theirs in zip(local, joint))


@layouts
def test_an_average_after_every_step_of_sgd_is_data_parallel(layout: str) -> None:
    """Rows have uneven weights: averages by rows, not tokens, would be far off. With decoupled decay."""
    decay = {"weight_decay": 0.1, "lr": 0.05}
    assert every_step_and_data_parallel(layout, weights="uneven", optimizer=decay) < 1e-6


@layouts
def test_so_it_is_with_momentum_if_the_weights_are_even(layout: str) -> None:
    momentum = {"betas": [0.9, 0.9]}
    assert every_step_and_data_parallel(layout, optimizer=momentum) < 1e-6


@layouts
@pytest.mark.parametrize(
    "optimizer", [{"name": "adamw", "lr": 0.02}, {"grad_clip_norm": 0.5}], ids=["adam", "clipping"]
)
def test_so_it_is_not_with_adam_or_clipping(layout: str, optimizer: dict[str, Any]) -> None:
    """These are not linear in the gradients, so averages of their updates are others."""
    assert every_step_and_data_parallel(layout, optimizer=optimizer) > 1e-4


def nesterov_steps(outer: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Start of the outer parameters, and those after each of five exchanges whose averages are recorded numbers."""
    strategy = DiLoCo(SyncConfig(strategy="diloco", outer=outer), 2)
    rng = np.random.default_rng(0)
    x = {"w": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)}
    own, found, weights = strategy.init(x), [], jnp.array([0.25, 0.75])
    start = np.asarray(x["w"])
    for _ in range(5):
        shift = jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32)
        local = jax.tree.map(lambda p, shift=shift: spread(p, 2) + shift, own["outer"])
        DELTAS.append(np.asarray(own["outer"]["w"] - jnp.tensordot(weights, local["w"], 1)))
        own, params = strategy.exchange(own, Replicas(local, weights), "all")
        assert_equal_bits(params["w"][0], params["w"][1])
        found.append(np.asarray(params["w"][0]))
    return start, found


DELTAS: list[np.ndarray] = []


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_optimizer_is_sgd_with_momentum(nesterov: bool) -> None:
    """The recurrence of torch.optim.SGD, by hand in float64, on the recorded changes."""
    DELTAS.clear()
    x, found = nesterov_steps({"lr": 0.7, "momentum": 0.9, "nesterov": nesterov})
    x, velocity = np.float64(x), 0.0
    for after, delta in zip(found, DELTAS, strict=True):
        velocity = 0.9 * velocity + delta
        x = x - 0.7 * (delta + 0.9 * velocity if nesterov else velocity)
        np.testing.assert_allclose(after, x, rtol=0, atol=1e-6 * max(1.0, np.abs(x).max()))


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_optimizer_is_that_of_torch(nesterov: bool) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    DELTAS.clear()
    start, found = nesterov_steps({"lr": 0.7, "momentum": 0.9, "nesterov": nesterov})
    x = torch.nn.Parameter(torch.tensor(start))
    sgd = torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=nesterov)
    for after, delta in zip(found, DELTAS, strict=True):
        x.grad = torch.tensor(delta)
        sgd.step()
        np.testing.assert_allclose(after, x.detach().numpy(), rtol=0, atol=1e-6 * max(1.0, np.abs(after).max()))


@layouts
def test_post_local_begins_as_bsp(layout: str) -> None:
    changes = {"optimizer": {"name": "adamw", "lr": 0.02}, "model": {"options": {"noise": 0.1}}}
    sync = {"strategy": "post_local", "every": 2, "bsp_steps": 3}
    ours, joint = (run(replicas(2, layout, sync=s, **changes), 5)[1] for s in (sync, {}))
    for mine, theirs in zip(ours[:3], joint):
        assert_close(mine["params"]["a"][0], theirs["params"]["a"], 2e-7)
        assert_equal_bits(mine["params"]["a"][0], mine["params"]["a"][1])
    assert difference(ours[3]["params"]["a"][0], ours[3]["params"]["a"][1]) > 1e-4
    assert_equal_bits(ours[4]["params"]["a"][0], ours[4]["params"]["a"][1])


def test_bsp_is_the_program_it_was() -> None:
    """The same state and compiled step as before there was a section `sync`: no part of it is in either."""
    program = tiny_net.program({"data": 2})
    assert set(program.state) == {"step", "params", "opt_state", "rng"}
    assert program.state is program.one
    assert program.step_at(7) is program.step
    state = program.init()
    assert program.agreed(state) is state
