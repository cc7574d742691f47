"""Islands that do not wait for one another: the outer optimizer against its formulas, and runs against `diloco`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tiny_net
from local_islands import LocalServer, Rows, train_islands
from test_island_identities import ADAMW

import jaxtrain
from jaxtrain.config.sections.sync import OuterConfig
from jaxtrain.errors import UserError
from jaxtrain.islands.server.delayed_nesterov import DelayedNesterovRule
from jaxtrain.islands.server.rules import Header

DILOCO = {"strategy": "diloco", "every": 3, "outer": {"lr": 0.7, "momentum": 0.9}}
ASYNC = DILOCO | {"strategy": "async_diloco"}
STEPS = 12


def header(count: int, islands: int, tokens: tuple[float, ...] | None = None) -> Header:
    ones = (1.0,) * count
    return Header(tuple(range(count)), tokens or ones, ones, 0, count / islands, (True,) * count)


def changes(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"w": rng.normal(size=(3, 2)).astype(np.float32)} for _ in range(count)]


def paper(x: np.ndarray, pushes: list[np.ndarray], islands: int, lr: float, momentum: float) -> np.ndarray:
    """Algorithm 3 of arXiv 2401.09135 with c = 0, push by push, in float64."""
    m, total = np.zeros_like(x), np.zeros_like(x)
    for t, change in enumerate(pushes):
        total = total + change
        x = x - lr * change / islands
        if (t + 1) % islands == 0:
            m = momentum * m + total / islands
            x = x - lr * momentum * m
            total = np.zeros_like(x)
    return x


@pytest.mark.parametrize("islands", [1, 3])
def test_single_pushes_are_those_of_the_paper(islands: int) -> None:
    rule = DelayedNesterovRule(OuterConfig(lr=0.7, momentum=0.9))
    start, given = changes(1, 1)[0], changes(10)
    state = rule.init(start, None)
    for count, change in enumerate(given, start=1):
        state = rule.update(state, [change], header(1, islands), None)
        pushes = [each["w"].astype(np.float64) for each in given[:count]]
        expected = paper(start["w"].astype(np.float64), pushes, islands, 0.7, 0.9)
        np.testing.assert_allclose(state["params"]["w"], expected, atol=2e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_steps_of_a_round_are_together_that_of_torch(nesterov: bool) -> None:
    """For their mean, in whatever order and groups they come; tokens weight those that come together."""
    rule = DelayedNesterovRule(OuterConfig(lr=0.5, momentum=0.8, nesterov=nesterov))
    start = changes(1, 1)[0]
    state, x, v = rule.init(start, None), start["w"].astype(np.float64), np.zeros((3, 2))
    for turn, groups in enumerate([(4,), (1, 3), (2, 1, 1)]):
        mean = np.zeros((3, 2))
        for number, size in enumerate(groups):
            pushes, tokens = changes(size, 10 * turn + number), tuple(range(1, size + 1))
            state = rule.update(state, pushes, header(size, 4, tokens), None)
            weighted = sum(t * each["w"].astype(np.float64) for t, each in zip(tokens, pushes)) / sum(tokens)
            mean = mean + size / 4 * weighted
        v = 0.8 * v + mean
        x = x - 0.5 * (mean + 0.8 * v if nesterov else v)
        np.testing.assert_allclose(state["params"]["w"], x, atol=2e-6)


def run(sync: dict[str, Any], islands: dict[str, Any]) -> tuple[Any, LocalServer]:
    config = tiny_net.config(sync=sync, islands=islands, steps=STEPS, optimizer=ADAMW)
    with LocalServer(config) as server:
        return train_islands(config, [{}] * config.islands.count, server, Rows()), server


@pytest.mark.parametrize("count", [1, 2])
def test_with_a_quorum_of_all_it_is_diloco(count: int) -> None:
    """One in which an island alone waits for nobody, and two that always meet."""
    theirs, _ = run(DILOCO, {"count": count})
    ours, server = run(ASYNC, {"count": count, "quorum": count})
    assert server.coordinator.version == STEPS // 3
    for (losses, state), (expected, same) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=2e-5)
        for name, value in same["params"].items():
            np.testing.assert_allclose(state["params"][name], value, atol=2e-6)


def test_a_slow_island_delays_nobody_and_its_work_counts() -> None:
    config = tiny_net.config(sync=ASYNC, islands={"count": 2}, steps=STEPS, optimizer=ADAMW)

    def pause(island: int, step: int) -> float:
        while (island, step) == (1, 2) and len(server.pushes()) < 4:
            time.sleep(0.02)
        return 0.0

    with LocalServer(config) as server:
        ours = train_islands(config, [{}] * 2, server, Rows(), pause)
    pushes = server.pushes()
    order = [push["island"] for push in pushes]
    assert order[:4] == [0] * 4  # all rounds of the fast one come before the first of the slow one
    assert sorted(order) == [0] * 4 + [1] * 4
    assert pushes[4]["staleness"] == 4
    updates = [record for record in server.log if record["event"] == "update"]
    assert len(updates) == 8
    assert all(np.isfinite(losses).all() and losses[-1] < losses[0] for losses, _ in ours)


def test_replicas_of_one_program_do_not_have_it() -> None:
    text = "sync.strategy: async_diloco is for islands (`jaxtrain launch islands`); expected diloco"
    with pytest.raises(UserError) as found:
        jaxtrain.load("quickstart", "sync.strategy=async_diloco")
    assert text in str(found.value)
