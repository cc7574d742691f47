"""Streaming DiLoCo of islands without a server: fragments that are averaged while the islands train on."""

from __future__ import annotations

import threading
from time import sleep
from typing import Any

import jax
import numpy as np
import pytest
from local_islands import LocalServer, Rows, agreed
from test_coordinator import OneIsland, Time, config
from test_island_identities import ADAMW, check, of_islands, one_program
from test_islands_without_server import alone, catch_up, fall_silent, together, wait_for

import jaxtrain
from jaxtrain.errors import UserError
from jaxtrain.islands.members import START_WAIT
from jaxtrain.islands.messages import SessionOverError
from jaxtrain.planning.islands import priced_strategies
from jaxtrain.planning.step_program import tree_bytes

pytestmark = pytest.mark.timeout(120)


def streaming(tau: int, fragments: int = 2, alpha: float = 0.0, every: int = 6) -> dict[str, Any]:
    outer = {"lr": 0.7, "momentum": 0.9}
    parts = {"fragments": fragments, "tau": tau, "alpha": alpha}
    return {"strategy": "streaming_diloco", "every": every, "outer": outer, "streaming": parts}


def run_config(count: int, tau: int = 1, **islands: Any) -> Any:
    return config(streaming(tau), count, servers=0, **islands)


def kept(island: OneIsland) -> Any:
    """What an island has agreed on with the others."""
    own = island.state["sync"]["own"]
    return jax.device_get({name: own[name] for name in ("outer", "velocity")})


def check_equal(*islands: OneIsland) -> None:
    for each in islands[1:]:
        jax.tree.map(np.testing.assert_array_equal, kept(each), kept(islands[0]))
        assert each.island.place(each.state) == islands[0].island.place(islands[0].state)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("count", "tau", "fragments", "alpha"),
    [(2, 0, 1, 0.0), (2, 2, 2, 0.0), (4, 1, 2, 0.5), (4, 0, 2, 0.0), (2, 1, 2, 1.0)],
)  # fmt: skip
@pytest.mark.parametrize("weights", ["even", "uneven"])
def test_fragments_are_those_of_one_program(count: int, tau: int, fragments: int, alpha: float, weights: str) -> None:
    """To rounding: programs of tests are compiled in a cheap way, which fuses fewer products with sums."""
    sync, data, changes = streaming(tau, fragments, alpha), Rows(weights=weights), {"optimizer": ADAMW}
    theirs, losses = one_program({"replica": count}, sync, data, **changes)
    ours, mean = of_islands([{}] * count, sync, data, islands={"servers": 0}, **changes)
    check(ours, theirs, 2e-6)
    if weights == "even":
        np.testing.assert_allclose(mean, losses, rtol=2e-6)


def test_islands_of_different_layouts_exchange_fragments() -> None:
    changes = {"optimizer": ADAMW}
    alike, _ = of_islands([{}, {}], streaming(2), Rows(), islands={"servers": 0}, **changes)
    mixed, _ = of_islands([{"fsdp": 4}, {"model": 2}], streaming(2), Rows(), islands={"servers": 0}, **changes)
    check(mixed, alike[0], 2e-6)


@pytest.mark.measures
def test_an_island_trains_on_while_a_fragment_travels(time: Time) -> None:
    """Two steps from the capture on nothing has arrived; the step at which it is due waits for it."""
    run = run_config(2, tau=2)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(2)]
        get, may_read = server.door.get, threading.Event()

        def slow(refs: list[Any], by_first: bool = False) -> list[Any]:
            assert may_read.wait(60)
            return get(refs)

        server.door.get = slow
        together(*(lambda each=each: each.step(2) for each in islands))
        assert server.coordinator.version == 0
        assert all(each.island._pending is not None for each in islands)
        waits = [threading.Thread(target=each.step, daemon=True) for each in islands]
        [thread.start() for thread in waits]
        sleep(0.5)
        assert all(thread.is_alive() for thread in waits)
        may_read.set()
        [thread.join(60) for thread in waits]
        check_equal(*islands)
        assert server.coordinator.version == 1
        server.door.get = get
        together(*(lambda each=each: each.step(3) for each in islands))
        pushes = server.pushes()
        assert [push["waited"] > 0.3 for push in pushes] == [False, False, True, True]
        assert server.coordinator.status()["islands"]["0"]["waited"] == pushes[2]["waited"] or pushes[2]["island"] == 1


def test_a_run_that_stops_while_a_fragment_travels_goes_on_bit_for_bit(time: Time) -> None:
    run = run_config(2, tau=2)
    found = []
    for stops in (False, True):
        with LocalServer(run, time) as server:
            islands = [OneIsland(server, run, index) for index in range(2)]
            together(*(lambda each=each: each.step(4) for each in islands))
            together(*(lambda each=each: each.step() for each in islands))  # step 5: a fragment is in flight
            saved = [jax.device_get(each.state) for each in islands]
            if not stops:
                together(*(lambda each=each: each.step(7) for each in islands))
                found.append(islands)
                continue
            [each.island.close() for each in islands]
        with LocalServer(run, time) as server:
            again = [OneIsland(server, run, index) for index in range(2)]
            for each, state in zip(again, saved):
                each.state, each.clock = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), state, each.state), 5
            together(*(lambda each=each: each.step(7) for each in again))
            found.append(again)
    (first, second), (third, fourth) = found
    check_equal(first, second)
    for a, b in ((first, third), (second, fourth)):
        jax.tree.map(
            np.testing.assert_array_equal, jax.device_get(a.state["params"]), jax.device_get(b.state["params"])
        )
        jax.tree.map(np.testing.assert_array_equal, kept(a), kept(b))


def test_an_island_that_dies_while_a_fragment_travels_is_left_out(time: Time) -> None:
    run = run_config(4)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(4)]
        together(*(lambda each=each: each.step(1) for each in islands))
        dying = islands[3].island

        def dies(*args: Any) -> Any:
            raise SystemExit

        dying.client._swapped = dies
        together(*(lambda each=each: each.step(1) for each in islands))  # captures
        threads = [threading.Thread(target=each.step, daemon=True) for each in islands[:3]]
        [thread.start() for thread in threads]
        sleep(0.3)
        assert server.coordinator.version == 0
        fall_silent(server, time, *islands[:3])
        [thread.join(60) for thread in threads]
        check_equal(*islands[:3])
        assert [record["islands"] for record in server.log if record["event"] == "update"] == [(0, 1, 2)]


def test_one_that_comes_late_begins_with_what_was_agreed_on(time: Time) -> None:
    run = run_config(2, heartbeat=START_WAIT)
    with LocalServer(run, time) as server:
        first = OneIsland(server, run, 0)
        alone(first, 6, server, time)
        late = OneIsland(server, run, 1)
        assert late.clock == 6
        catch_up(late, first, 3)
        assert late.clock == 9
        check_equal(first, late)
        jax.tree.map(np.testing.assert_array_equal, late.params, kept(first)["outer"])
        together(lambda: first.step(6), lambda: late.step(6))
        check_equal(first, late)
        assert [record["islands"] for record in server.log if record["event"] == "update"][-2:] == [(0, 1), (0, 1)]


def test_old_work_is_dropped_and_the_island_goes_on_with_the_others(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        first, sleeper = (OneIsland(server, run, index) for index in range(2))
        together(lambda: first.step(3), lambda: sleeper.step(3))
        fall_silent(server, time, first)
        first.step(3)
        thread = threading.Thread(
            target=sleeper.step, args=(3,), daemon=True
        )  # its exchange is of a round that is over
        thread.start()
        wait_for(server, "join", clock=6)
        first.step(3)
        thread.join(60)
        assert sleeper.island.behind == 9
        check_equal(first, sleeper)


def test_an_island_that_goes_back_to_an_older_checkpoint_continues_from_the_others(time: Time) -> None:
    """Also while a fragment of later steps travels."""
    run = run_config(2, tau=2)
    with LocalServer(run, time) as server:
        first, back = (OneIsland(server, run, index) for index in range(2))
        together(lambda: first.step(2), lambda: back.step(2))
        older = jax.tree.map(np.copy, jax.device_get(back.state))
        together(lambda: first.step(2), lambda: back.step(2))  # a fragment is in flight
        back.state, back.clock = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), older, back.state), 2
        thread = threading.Thread(target=back.step, daemon=True)
        thread.start()
        first.step(2)  # which both exchange
        wait_for(server, "late")
        first.step(3)
        thread.join(60)
        assert back.island.behind == 9
        assert [record["islands"] for record in server.log if record["event"] == "update"] == [(0, 1), (0, 1), (0,)]
        jax.tree.map(np.testing.assert_array_equal, kept(back), kept(first))


def test_numbers_that_are_not_finite_are_left_out(time: Time) -> None:
    run = run_config(2, tau=1)
    with LocalServer(run, time) as server:
        good, bad = (OneIsland(server, run, index) for index in range(2))
        together(lambda: good.step(1), lambda: bad.step(1))
        bad.state["params"] = jax.tree.map(lambda x: x * np.nan, bad.state["params"])
        metrics, _ = together(lambda: good.step(2), lambda: bad.step(2))
        assert metrics["left_out"] == 1
        check_equal(good, bad)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((bad.params, kept(bad))))
        before = kept(good)
        for each in (good, bad):
            each.state["params"] = jax.tree.map(lambda x: x * np.nan, each.state["params"])
        together(lambda: good.step(3), lambda: bad.step(3))
        check_equal(good, bad)
        jax.tree.map(np.testing.assert_array_equal, kept(good), before)  # nobody had any


def test_an_island_that_ends_while_a_fragment_travels_does_not_join_again(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(2)]
        together(*(lambda each=each: each.step(1) for each in islands))
        islands[0].step(1)  # waits for the other one in a thread
        islands[0].island.close()
        assert list(server.coordinator.members) == [1]
        with pytest.raises(SessionOverError):
            islands[0].island._pending.result()
        islands[1].step(2)
        assert [record["islands"] for record in server.log if record["event"] == "update"] == [(1,)]


def test_the_bytes_of_a_fragment_are_those_of_the_plan(time: Time) -> None:
    run = run_config(4, tau=2)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(4)]
        total = dict.fromkeys(("exchanged_bytes", "received_bytes"), 0.0)
        for _ in range(2):  # of the two fragments one is larger
            for each in together(*(lambda each=each: each.step(3) for each in islands)):
                total = {name: before + each[name] for name, before in total.items()}
        sizes = tree_bytes(islands[0].program)
    (own, *_) = priced_strategies(run, sizes, tokens=1, seconds=None, rate=None)
    assert own.every == 3
    assert total["exchanged_bytes"] == 4 * 2 * own.sent
    assert total["received_bytes"] == 4 * 2 * own.received


def test_the_plan_waits_for_what_training_does_not_hide() -> None:
    sizes = {"params": 4 * 10**6, "mutable": 0, "mean": 4 * 10**6, "mutable mean": 0, "gradients": 4 * 10**6}
    found = {}
    for tau in (0, 1, 3):
        run = config(streaming(tau, every=8), 2, servers=0)
        found[tau], *_ = priced_strategies(run, sizes, tokens=10, seconds=1.0, rate=10**6)
    fragment = (1 / 2) * 2 * 4 * 10**6 / 2  # seconds at 1 MB/s: 2 s
    assert found[0].sent == found[0].received == fragment
    assert [each.exchange_seconds for each in found.values()] == [2.0, 1.0, 0.0]
    assert [each.wait_seconds for each in found.values()] == [0.5, 0.25, 0.0]
    assert found[3].tokens_per_second == 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "islands.servers: streaming_diloco is for islands without a server; expected 0"),
        (["islands.servers=0", "sync.streaming.tau=3"], "sync.streaming.tau"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], message: str) -> None:
    base = ["islands.count=2", "sync.strategy=streaming_diloco", "sync.every=6", "sync.streaming.fragments=2"]
    with pytest.raises(UserError) as found:
        jaxtrain.load("quickstart", "data.global_batch=8", *base, *overrides)
    assert message in str(found.value)


def test_validation_uses_what_was_agreed_on(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(2)]
        together(*(lambda each=each: each.step(4) for each in islands))
        for each in islands:
            used = jax.device_get(each.program.agreed(each.state)["params"])
            jax.tree.map(np.testing.assert_array_equal, used, agreed(each.state))
        assert any((islands[0].params[name] != islands[1].params[name]).any() for name in islands[0].params)
