"""Islands that average among themselves: who takes part, who leaves in the middle, who comes late or again."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_islands import LocalServer
from test_coordinator import OneIsland, Time, config

import jaxtrain
from jaxtrain.errors import UserError
from jaxtrain.islands.members import SILENCE, START_WAIT
from jaxtrain.islands.messages import LostValueError
from jaxtrain.islands.peers.rounds import Entry, Place, RoundAttempt, Rounds, Standing
from jaxtrain.planning.islands import priced_strategies
from jaxtrain.planning.step_program import tree_bytes

pytestmark = pytest.mark.timeout(120)
DILOCO = {"strategy": "diloco", "every": 2, "outer": {"lr": 0.7, "momentum": 0.9}}


@pytest.fixture
def time() -> Time:
    return Time()


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(120) for each in [pool.submit(call) for call in calls]]


def alone(island: OneIsland, steps: int, server: LocalServer, time: Time) -> None:
    """Takes first steps of an island that waits for others which do not come."""
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(island.step, steps)
        sleep(0.2)
        assert server.coordinator.version == 0
        time.now += START_WAIT
        server.door.call("check_silence")
        trained.result(60)


def fall_silent(server: LocalServer, time: Time, *alive: OneIsland) -> None:
    """Lets the time pass after which an island has left that gives no sign of life."""
    for _ in range(2):
        time.now += SILENCE * server.coordinator.config.heartbeat / 2 + 1
        [each.island.client.beat() for each in alive]
    server.door.call("check_silence")


def wait_for(server: LocalServer, event: str, **facts: Any) -> None:
    """Waits for a record."""
    while not any(record | {"event": event, **facts} == record for record in server.log):
        sleep(0.05)
    sleep(0.2)


def catch_up(late: OneIsland, first: OneIsland, steps: int) -> None:
    """Lets an island begin with what another one has after some steps."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(late.island.client.catch_up)
        sleep(0.3)
        assert not found.done()
        first.step(steps)
        arrived = found.result(60)
    assert arrived.clock == first.clock
    late.state, late.clock = late.island.with_values(late.state, arrived), arrived.clock


def agreed(island: OneIsland) -> dict[str, np.ndarray]:
    return jax.device_get(island.state["sync"]["agreed"])


def own(island: OneIsland) -> Any:
    return jax.device_get(island.state["sync"]["own"])


def check_equal(*islands: OneIsland) -> None:
    for each in islands[1:]:
        jax.tree.map(np.testing.assert_array_equal, (agreed(each), own(each)), (agreed(islands[0]), own(islands[0])))
        assert each.island.place(each.state) == islands[0].island.place(islands[0].state)


def run_config(count: int, **islands: Any) -> Any:
    return config(DILOCO, count, servers=0, **islands)


def test_all_have_the_same_after_a_round_and_one_that_leaves_is_not_waited_for(time: Time) -> None:
    run = run_config(4)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(4)]
        together(*(lambda each=each: each.step(4) for each in islands))
        check_equal(*islands)
        islands[2].island.client.leave()
        islands.pop(2)
        together(*(lambda each=each: each.step(2) for each in islands))
        check_equal(*islands)
        updates = [record["islands"] for record in server.log if record["event"] == "update"]
        assert updates == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 3)]
        assert islands[0].island.place(islands[0].state)[0] == 3


def test_an_island_that_dies_in_the_middle_of_an_exchange_leaves_nothing_behind(time: Time) -> None:
    """The others average again, from what they had."""
    run = run_config(4)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(4)]
        together(*(lambda each=each: each.step(1) for each in islands))
        dying, hangs = islands[3], threading.Event()

        def dies(*args: Any) -> Any:
            hangs.set()
            raise SystemExit

        dying.island.client._swapped = dies
        with ThreadPoolExecutor(4) as pool:
            exchanges = [pool.submit(each.step, 1) for each in islands]
            assert hangs.wait(60)
            sleep(0.3)
            assert server.coordinator.version == 0
            fall_silent(server, time, *islands[:3])
            [exchange.result(60) for exchange in exchanges[:3]]
        check_equal(*islands[:3])
        updates = [record["islands"] for record in server.log if record["event"] == "update"]
        assert updates == [(0, 1, 2)]


def test_the_bytes_of_a_round_are_those_of_the_plan(time: Time) -> None:
    run = run_config(4)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(4)]
        metrics = together(*(lambda each=each: each.step(2) for each in islands))
        sizes = tree_bytes(islands[0].program)
    (own, *_) = priced_strategies(run, sizes, tokens=1, seconds=None, rate=None)
    for name, planned in (("exchanged_bytes", own.sent), ("received_bytes", own.received)):
        found = [each[name] for each in metrics]
        assert sum(found) == 4 * planned
        assert max(found) < 1.2 * planned  # parts are of whole rows


def test_a_value_that_is_lost_is_sent_again(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(2)]
        get, lost = server.door.get, []

        def fails_twice(refs: list[Any], by_first: bool = False) -> list[Any]:
            if len(lost) < 2:
                lost.append(refs)
                raise LostValueError("islands: a value is lost (ObjectLostError)")
            return get(refs)

        server.door.get = fails_twice
        together(*(lambda each=each: each.step(2) for each in islands))
        check_equal(*islands)
        assert len(lost) == 2
        assert server.coordinator.rounds.last.number > 1


def test_an_island_that_comes_late_gets_the_values_of_another_one(time: Time) -> None:
    run = run_config(2, heartbeat=START_WAIT)
    with LocalServer(run, time) as server:
        first = OneIsland(server, run, 0)
        alone(first, 4, server, time)
        late = OneIsland(server, run, 1)
        assert late.clock == 4
        assert late.island.client.has_values
        catch_up(late, first, 2)
        assert late.clock == 6
        check_equal(first, late)
        together(lambda: first.step(2), lambda: late.step(2))
        check_equal(first, late)
        assert server.coordinator.version == 4


def test_an_island_whose_stay_ends_while_it_waits_joins_again(time: Time) -> None:
    run = run_config(2, heartbeat=START_WAIT)
    with LocalServer(run, time) as server:
        first = OneIsland(server, run, 0)
        alone(first, 2, server, time)
        late = OneIsland(server, run, 1)
        for wait in (late.island.client.catch_up, lambda: late.island.client.start(4, dict, (1, 77))):
            session = server.coordinator.members[1].session
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(wait)
                sleep(0.3)
                server.door.call("leave", 1, session)
                while 1 not in server.coordinator.members or server.coordinator.members[1].session == session:
                    sleep(0.02)
                sleep(0.2)
                first.step(2)
                arrived = found.result(60)
            assert arrived.clock == first.clock
            assert arrived.place == first.island.place(first.state)


def test_old_work_is_dropped_and_the_island_goes_on_where_the_others_are(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        first, sleeper = (OneIsland(server, run, index) for index in range(2))
        together(lambda: first.step(2), lambda: sleeper.step(2))
        fall_silent(server, time, first)
        first.step(4)
        with ThreadPoolExecutor(1) as pool:
            woken = pool.submit(sleeper.step, 2)  # its exchange is of a round that is over
            wait_for(server, "join", clock=6)
            first.step(2)
            woken.result(60)
        assert sleeper.island.behind == 8
        check_equal(first, sleeper)
        assert server.coordinator.status()["islands"]["1"]["clock"] == 8


def test_an_island_that_goes_back_to_an_older_checkpoint_continues_from_the_others(time: Time) -> None:
    """As after a loss that spikes; its older values are no part of a round of the others."""
    run = run_config(2)
    with LocalServer(run, time) as server:
        first, back = (OneIsland(server, run, index) for index in range(2))
        together(lambda: first.step(2), lambda: back.step(2))
        older = jax.tree.map(jnp.copy, back.state)
        together(lambda: first.step(2), lambda: back.step(2))
        back.state, back.clock = older, 2
        with ThreadPoolExecutor(1) as pool:
            left_behind = pool.submit(back.step, 2)
            wait_for(server, "late")
            first.step(2)
            left_behind.result(60)
        assert back.island.behind == 6
        check_equal(first, back)
        assert [record["islands"] for record in server.log if record["event"] == "update"][-1] == (0,)


def test_a_coordinator_that_has_lost_all_costs_nothing(time: Time) -> None:
    """The islands say where they are, and go on from there."""
    run = run_config(2)
    with LocalServer(run, time) as server, LocalServer(run, time) as other:
        islands = [OneIsland(server, run, index) for index in range(2)]
        together(*(lambda each=each: each.step(3) for each in islands))
        for each in islands:
            each.island.client._door = other.door
        together(*(lambda each=each: each.step(1) for each in islands))
        check_equal(*islands)
        number, _ = islands[0].island.place(islands[0].state)
        assert number == 2
        assert [record["event"] for record in other.log].count("late") == 0


def test_those_that_start_at_different_places_go_on_from_the_furthest(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        ahead = OneIsland(server, run, 0)
        behind = OneIsland(server, run, 1)
        ahead.state["sync"]["place"] = jnp.asarray([3, 77], jnp.uint32)
        ahead.clock = 6
        with ThreadPoolExecutor(2) as pool:
            late = pool.submit(behind.step, 1)
            ahead.step(2)
            late.result(60)
        assert behind.island.behind == 8
        check_equal(ahead, behind)


def test_one_that_is_alone_waits_a_while_then_trains(time: Time) -> None:
    run = run_config(2, heartbeat=START_WAIT)
    with LocalServer(run, time) as server:
        alone(OneIsland(server, run, 0), 4, server, time)
        assert server.coordinator.version == 2


def test_one_island_alone_takes_the_steps_of_diloco() -> None:
    """Against torch's SGD by hand: x <- x - lr (D + momentum v) with Nesterov's momentum."""
    run = run_config(1)
    with LocalServer(run) as server:
        island = OneIsland(server, run, 0)
        x = jax.device_get(island.state["params"])
        velocity = jax.tree.map(np.zeros_like, x)
        for _ in range(3):
            island.step(1)
            wants = island.program.step  # the same step without an exchange
            local, _ = wants(island.island.merge(jax.tree.map(jnp.copy, island.state)), island.place(island.clock))
            island.step(1)
            change = jax.tree.map(lambda a, b: a - b, x, jax.device_get(local["params"]))
            velocity = jax.tree.map(lambda v, d: 0.9 * v + d, velocity, change)
            x = jax.tree.map(lambda a, v, d: a - 0.7 * (d + 0.9 * v), x, velocity, change)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), x, agreed(island))


def test_numbers_that_are_not_finite_are_left_out(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        good, bad = (OneIsland(server, run, index) for index in range(2))
        together(lambda: good.step(1), lambda: bad.step(1))
        bad.state["params"] = jax.tree.map(lambda x: x * jnp.nan, bad.state["params"])
        metrics, _ = together(lambda: good.step(1), lambda: bad.step(1))
        assert metrics["left_out"] == 1
        check_equal(good, bad)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(bad.params))
        for each in (good, bad):
            each.state["params"] = jax.tree.map(lambda x: x * jnp.nan, each.state["params"])
        before = agreed(good)
        together(lambda: good.step(2), lambda: bad.step(2))
        check_equal(good, bad)
        jax.tree.map(np.testing.assert_array_equal, agreed(good), before)  # nobody had any: all go back


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["sync.strategy=asp"],
            "islands.servers: asp needs a server; expected at least 1, or local_sgd, diloco, muloco, "
            "streaming_diloco or gossip",
        ),
        (["sync.strategy=async_diloco"], "islands.servers: async_diloco needs a server"),
        (["sync.strategy=diloco", "islands.late=scale"], "islands.late: without a server late work is dropped"),
    ],
)
def test_what_needs_a_server_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as found:
        jaxtrain.load("quickstart", "islands.count=2", "islands.servers=0", *overrides)
    assert message in str(found.value)


class Simulation:
    """Islands that run, die and come back in any order, and what each believes to hold."""

    def __init__(self, count: int, quorum: int, seed: int) -> None:
        self.random = random.Random(seed)
        tokens = itertools.count(1)
        self.rounds = Rounds(quorum, 0.0, count, lambda: next(tokens))
        self.count = count
        self.place: dict[int, Place] = {}  # of those that live
        self.attempt: dict[int, RoundAttempt] = {}  # whose result an island has, or computes
        self.saved: dict[int, Place] = {}
        self.history: dict[Place, frozenset[int]] = {}

    def step(self) -> None:
        island = self.random.randrange(self.count)
        rounds, place = self.rounds, self.place.get(island)
        if place is None:
            rounds.join(island)
            self.place[island] = self.saved.get(island, Place())
            return
        if self.random.random() < 0.02:
            self.saved[island] = self.random.choice([self.saved.get(island, Place()), self.place.pop(island)])
            self.attempt.pop(island, None)
            before = rounds.place
            rounds.leave(island)
            self._note(before)
            return
        standing = rounds.standings[island]
        if standing == Standing.STARTS:
            rounds.start(island, place)
            rounds.begin(self.random.random() < 0.3)
        elif standing == Standing.WAITS:
            if not rounds.has_values:
                rounds.join(island)
            elif any(rounds.standings[i] != Standing.WAITS and self.place[i] == rounds.place for i in self.place):
                for each in rounds.gave():
                    self.place[each] = rounds.place
        elif standing == Standing.TRAINS:
            rounds.ready(Entry(island, 1.0, True), place)
            rounds.next(0.0)
        else:
            rounds.next(0.0)
            attempt = rounds.attempt
            if rounds.last is not None and self.attempt.get(island) is rounds.last:
                self.place[island] = rounds.place
            if attempt is not None and island in attempt.islands:
                self.attempt[island] = attempt
                before = rounds.place
                rounds.done(island, attempt.number)
                self._note(before)

    def _note(self, before: Place) -> None:
        """Gives those of a round that now counts its place."""
        if self.rounds.place == before:
            return
        last = self.rounds.last
        assert last is not None
        assert self.rounds.place.number == before.number + 1
        assert self.rounds.place not in self.history
        here = [island for island in last.islands if island in self.place]
        assert here
        for island in here:
            assert self.attempt.get(island) is last  # each of them has the result
            assert self.place[island] == before  # and began from the round before
            self.place[island] = self.rounds.place
        self.history[self.rounds.place] = frozenset(here)


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 1 << 30))
def test_a_round_counts_for_all_that_have_it_or_for_nobody(count: int, quorum: int, seed: int) -> None:
    simulation = Simulation(count, min(quorum, count), seed)
    for _ in range(400):
        simulation.step()
    for island, place in simulation.place.items():
        if simulation.rounds.standings[island] == Standing.READY:
            assert place == simulation.rounds.place


def test_rounds_go_on_whoever_dies() -> None:
    """Most of a long simulation's steps end in rounds: nobody waits for ever."""
    simulation = Simulation(4, 0, 7)
    for _ in range(20000):
        simulation.step()
    assert len(simulation.history) > 500
