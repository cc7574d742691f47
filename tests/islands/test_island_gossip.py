"""Islands that gossip: the mixture is that of one program, and nobody is waited for but neighbours that are there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from flax import nnx
from local_islands import LocalServer, Rows, train_islands
from test_coordinator import OneIsland, Time, config
from test_islands_without_server import alone, catch_up, fall_silent, together

import jaxtrain
from jaxtrain.core.placement import Placer
from jaxtrain.core.program import build_program
from jaxtrain.errors import UserError
from jaxtrain.islands.members import START_WAIT
from jaxtrain.islands.messages import LostValueError
from jaxtrain.islands.report.history import IslandsHistory
from jaxtrain.islands.status import status_table
from jaxtrain.planning.islands import priced_strategies
from jaxtrain.planning.step_program import tree_bytes
from jaxtrain.sync.gossip.graphs import messages_of, mixing_matrix, round_number

pytestmark = pytest.mark.timeout(240)
GRAPHS = ("ring", "exponential", "matching")
ADAMW = {"name": "adamw", "lr": 0.02, "weight_decay": 0.1}


@pytest.fixture
def time() -> Time:
    return Time()


def run_config(count: int, graph: str = "ring", every: int = 2, **islands: Any) -> Any:
    sync = {"strategy": "gossip", "every": every, "gossip": {"graph": graph}}
    run = config(sync, count, servers=0, **islands)
    rows = tiny_net.ROWS // count * count
    return run.model_copy(update={"data": run.data.model_copy(update={"global_batch": rows})})


def opened(server: LocalServer, run: Any, count: int) -> list[OneIsland]:
    """Islands that have begun, each with values of its own."""
    islands = [OneIsland(server, run, index) for index in range(count)]
    together(*(lambda each=each: begin(each) for each in islands))
    return islands


def begin(island: OneIsland) -> None:
    island.state = island.island.begun(island.state, island.clock)
    scale = 1.0 + island.island.client.index
    island.state["params"] = jax.tree.map(lambda x: x * scale, island.state["params"])


def meet(island: OneIsland) -> dict[str, float]:
    """The meeting after a round in which nothing is learnt."""
    island.clock += island.island._sync.every
    island.state, metrics = island.island._exchange(island.state, island.clock, 0.0)
    return {name: float(value) for name, value in metrics.items()}


def table(islands: list[OneIsland]) -> np.ndarray:
    """Parameters of all islands, [islands, parameters]."""
    return np.stack([np.concatenate([np.ravel(x) for x in jax.tree.leaves(each.params)]) for each in islands])


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_meeting_is_a_product_with_the_matrix_of_the_graph(graph: str, count: int, time: Time) -> None:
    run = run_config(count, graph)
    with LocalServer(run, time) as server:
        islands = opened(server, run, count)
        for number in range(3):
            before = table(islands)
            metrics = together(*(lambda each=each: meet(each) for each in islands))
            parts = messages_of(graph, count, round_number(graph, count, number, 0))
            expected = mixing_matrix(parts, count) @ before
            np.testing.assert_allclose(table(islands), expected, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(table(islands).sum(0), before.sum(0), rtol=2e-6, atol=1e-6)
            moved = np.linalg.norm(expected - before, axis=1)
            np.testing.assert_allclose([each["mixing_distance"] for each in metrics], moved, rtol=1e-4, atol=1e-6)
            sending = [sum(receiver == i for part in parts for _, receiver in part.edges) for i in range(count)]
            assert [(each["pushing"], each["left_out"]) for each in metrics] == [(n, 0) for n in sending]
        assert server.coordinator.meetings.meetings == {}


def test_four_islands_agree_after_two_meetings_of_the_exponential_graph(time: Time) -> None:
    run = run_config(4, "exponential")
    with LocalServer(run, time) as server:
        islands = opened(server, run, 4)
        before = table(islands)
        assert np.abs(before - before.mean(0)).max() > 0.1
        for _ in range(2):
            together(*(lambda each=each: meet(each) for each in islands))
        np.testing.assert_allclose(table(islands), np.broadcast_to(before.mean(0), before.shape), rtol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"model": 2}])
def test_islands_are_replicas_of_one_program_on_each_layout(layout: dict[str, int]) -> None:
    """To rounding: programs of tests are compiled in a cheap way. `test_island_identities` has it bit for bit."""
    sync = {"strategy": "gossip", "every": 3, "gossip": {"graph": "exponential"}}
    given, data = {"sync": sync, "steps": 12, "optimizer": ADAMW}, Rows(weights="uneven")
    one = tiny_net.config(mesh={"replica": 2, **layout}, **given)
    program = build_program(one, None, jax.devices()[:4], data.batch(0))
    place, state = Placer(data.batch, program.sharder, tiny_net.ROWS, False), program.init()
    for step in range(12):
        state, _ = program.step_at(step)(state, place(step))
    expected = jax.device_get(state["params"])
    run = tiny_net.config(islands={"count": 2, "servers": 0}, **given)
    other = {"model": 2} if "fsdp" in layout else {"fsdp": 2}
    for meshes in ([layout, layout], [layout, other]):
        with LocalServer(run) as server:
            found = train_islands(run, meshes, server, data)
        for island, (_, ours) in enumerate(found):
            for name, values in expected.items():
                np.testing.assert_allclose(ours["params"][name], values[island], rtol=2e-6, atol=2e-6)


class Counted(nnx.Module):
    """A net with a running mean of its inputs, and an integer that counts passes."""

    rows_are_independent = True

    def __init__(self, *, env: Any, rngs: Any) -> None:
        self.weight = env.param(rngs, ("embed", "mlp"), (tiny_net.WIDTH, tiny_net.WIDTH), tiny_net.normal)
        self.env = env
        self.mean = nnx.Variable(jnp.zeros(tiny_net.WIDTH))
        self.passes = nnx.Variable(jnp.zeros((), jnp.int32))

    def loss(self, batch: Any, key: Any) -> Any:
        self.passes.set_value(self.passes[...] + 1)
        self.mean.set_value(0.5 * self.mean[...] + 0.5 * batch["x"].mean(0))
        error = batch["x"] @ self.env.weight(self.weight) - batch["y"]
        return {"square": (jnp.sum(batch["w"][:, None] * error**2), jnp.sum(batch["w"]))}


def test_variables_with_fractions_are_mixed_like_parameters(time: Time) -> None:
    run = run_config(2)
    run = run.model_copy(update={"model": tiny_net.config(model={"type": "test_island_gossip:Counted"}).model})
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(2)]
        together(*(lambda each=each: each.step(2) for each in islands))
        halves = [np.split(tiny_net.rows(step)["x"], 2) for step in range(2)]
        means = [0.25 * halves[0][i].mean(0) + 0.5 * halves[1][i].mean(0) for i in range(2)]
        for each in islands:
            np.testing.assert_allclose(each.state["mutable"]["mean"], (means[0] + means[1]) / 2, atol=1e-6)
            assert each.state["mutable"]["passes"] == 2


@pytest.mark.parametrize("has_sent", [False, True])
def test_an_island_that_dies_in_a_meeting_holds_nobody_up_for_long(has_sent: bool, time: Time) -> None:
    """What it has sent counts, and without that its neighbours keep their own values in its place."""
    run = run_config(4)
    with LocalServer(run, time) as server:
        islands = opened(server, run, 4)
        before, hangs = table(islands), threading.Event()

        def dies(*args: Any) -> Any:
            hangs.set()
            raise SystemExit

        islands[3].island.client._met = dies
        if not has_sent:
            islands[3].island.client.exchange = dies
        with ThreadPoolExecutor(4) as pool:
            meetings = [pool.submit(meet, each) for each in islands]
            assert hangs.wait(60)
            meetings[1].result(60)  # no neighbour of 3
            if not has_sent:
                sleep(0.3)
                assert not meetings[0].done()
                assert not meetings[2].done()
                fall_silent(server, time, *islands[:3])
            found = [meeting.result(60) for meeting in meetings[:3]]
        matrix = mixing_matrix(messages_of("ring", 4), 4)[:3]
        if not has_sent:
            matrix[[0, 2], [0, 2]] += matrix[[0, 2], 3]
            matrix[:, 3] = 0
        np.testing.assert_allclose(table(islands[:3]), matrix @ before, rtol=1e-6, atol=1e-7)
        missing = 0 if has_sent else 1
        assert [each["left_out"] for each in found] == [missing, 0, missing]
        assert not has_sent or 3 in server.coordinator.members


def test_a_value_that_is_lost_is_left_out(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        islands = opened(server, run, 2)
        before, get, lost = table(islands), server.door.get, threading.Lock()

        def fails_once(refs: list[Any], by_first: bool = False) -> list[Any]:
            if lost.acquire(blocking=False):
                raise LostValueError("islands: a value is lost (OwnerDiedError)")
            return get(refs)

        server.door.get = fails_once
        found = together(*(lambda each=each: meet(each) for each in islands))
        assert sorted(each["left_out"] for each in found) == [0, 1]
        for index, each in enumerate(found):
            expected = before[index] if each["left_out"] else before.mean(0)
            np.testing.assert_allclose(table(islands)[index], expected, rtol=1e-6)


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
        np.testing.assert_array_equal(*table([first, late]))
        assert [each["pushing"] for each in together(lambda: first.step(2), lambda: late.step(2))] == [1, 1]
        assert late.island.behind is None


def test_one_that_is_killed_and_back_meets_the_others_again(time: Time) -> None:
    run = run_config(3)
    with LocalServer(run, time) as server:
        islands = opened(server, run, 3)
        together(*(lambda each=each: meet(each) for each in islands))
        again = OneIsland(server, run, 2)  # the coordinator has not noticed yet
        assert [record["reason"] for record in server.log if record["event"] == "leave"] == ["joins again"]
        assert again.clock == 2
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(again.island.client.catch_up)
            sleep(0.2)
            metrics = together(*(lambda each=each: meet(each) for each in islands[:2]))
            arrived = found.result(60)
        assert [each["pushing"] for each in metrics] == [1, 1]
        again.state, again.clock = again.island.with_values(again.state, arrived), arrived.clock
        islands[2] = again
        assert any(np.array_equal(table([again]), table([each])) for each in islands[:2])
        metrics = together(*(lambda each=each: meet(each) for each in islands))
        assert [each["pushing"] for each in metrics] == [2, 2, 2]


def test_one_that_was_silent_goes_on_from_its_own_values_if_the_others_are_no_further(time: Time) -> None:
    run = run_config(3)
    with LocalServer(run, time) as server, ThreadPoolExecutor(1) as pool:
        islands = opened(server, run, 3)
        before = table(islands)
        first = pool.submit(meet, islands[0])
        while not server.pushes():
            sleep(0.02)
        server.door.call("leave", 1, server.coordinator.members[1].session)
        assert meet(islands[1])["pushing"] == 0  # the meeting goes on without it
        assert islands[1].island.behind is None
        np.testing.assert_array_equal(table(islands)[1], before[1])
        assert not first.done()
        assert meet(islands[2])["pushing"] == 1
        assert first.result(60)["left_out"] == 1
        metrics = together(*(lambda each=each: meet(each) for each in islands))
        assert [each["pushing"] for each in metrics] == [2, 2, 2]


def test_old_work_is_dropped_and_the_island_goes_on_where_the_others_are(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        first, sleeper = opened(server, run, 2)
        together(lambda: meet(first), lambda: meet(sleeper))
        server.door.call("leave", 1, server.coordinator.members[1].session)
        [meet(first) for _ in range(2)]
        with ThreadPoolExecutor(1) as pool:
            woken = pool.submit(meet, sleeper)
            while server.coordinator.meetings.waiting != [1]:
                sleep(0.02)
            meet(first)
            woken.result(60)
        assert sleeper.island.behind == first.clock == 8
        np.testing.assert_array_equal(*table([first, sleeper]))
        assert [record["event"] for record in server.log].count("late") == 1
        assert server.coordinator.status()["islands"]["1"]["dropped"] == 1


def test_those_that_start_at_different_checkpoints_go_on_from_the_furthest(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server:
        ahead, behind = OneIsland(server, run, 0), OneIsland(server, run, 1)
        ahead.state["params"] = jax.tree.map(lambda x: 2 * x, ahead.state["params"])
        ahead.clock, behind.clock = 6, 2
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(behind.step, 1)
            ahead.step(2)
            late.result(60)
        assert behind.island.behind == 8
        np.testing.assert_array_equal(*table([ahead, behind]))


def test_a_coordinator_that_has_lost_all_costs_no_work(time: Time) -> None:
    run = run_config(2)
    with LocalServer(run, time) as server, LocalServer(run, time) as other:
        islands = opened(server, run, 2)
        together(*(lambda each=each: meet(each) for each in islands))
        for each in islands:
            each.island.client._door = other.door
        before = table(islands)
        metrics = together(*(lambda each=each: meet(each) for each in islands))
        assert [each["pushing"] for each in metrics] == [1, 1]
        np.testing.assert_allclose(table(islands), np.broadcast_to(before.mean(0), before.shape), rtol=1e-6)
        assert other.coordinator.version == 2


def test_numbers_that_are_not_finite_are_replaced_by_the_mean_of_the_neighbours(time: Time) -> None:
    run = run_config(3)
    with LocalServer(run, time) as server:
        islands = opened(server, run, 3)
        before = table(islands)
        bad = islands[1]
        bad.state["params"] = jax.tree.map(lambda x: x * jnp.nan, bad.state["params"])
        metrics = together(*(lambda each=each: meet(each) for each in islands))
        a, b = before[0], before[2]
        expected = [2 / 3 * a + 1 / 3 * b, (a + b) / 2, 2 / 3 * b + 1 / 3 * a]
        np.testing.assert_allclose(table(islands), expected, rtol=1e-6, atol=1e-7)
        assert [each["left_out"] for each in metrics] == [1, 0, 1]
        assert [push["is_finite"] for push in sorted(server.pushes(), key=lambda push: push["island"])] == [1, 0, 1]
        for each in islands:
            each.state["params"] = jax.tree.map(lambda x: x * jnp.nan, each.state["params"])
        metrics = together(*(lambda each=each: meet(each) for each in islands))
        assert [each["left_out"] for each in metrics] == [2, 2, 2]  # nobody had any


def test_a_slow_island_holds_up_its_neighbours_alone(time: Time) -> None:
    run = run_config(6, every=1)
    with LocalServer(run, time) as server:
        islands = opened(server, run, 6)
        with ThreadPoolExecutor(6) as pool:
            others = [pool.submit(lambda each=each: [meet(each) for _ in range(3)]) for each in islands[1:]]
            deadline = monotonic() + 60
            while [each.clock for each in islands[1:]] != [1, 2, 3, 2, 1] and monotonic() < deadline:
                sleep(0.05)
            sleep(0.3)
            assert [each.clock for each in islands[1:]] == [1, 2, 3, 2, 1]  # in that meeting, or done with it
            slow = pool.submit(lambda: [meet(islands[0]) for _ in range(3)])
            [each.result(60) for each in [*others, slow]]
        assert max(push["ahead"] for push in server.pushes()) == 2
        assert server.coordinator.meetings.meetings == {}


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_bytes_of_a_meeting_are_those_of_the_plan(graph: str, time: Time) -> None:
    run = run_config(4, graph)
    with LocalServer(run, time) as server:
        islands = opened(server, run, 4)
        metrics = together(*(lambda each=each: meet(each) for each in islands))
        sizes = tree_bytes(islands[0].program)
    own, *choices = priced_strategies(run, sizes, tokens=1, seconds=None, rate=None)
    assert own.name == "gossip, every 2"
    assert own.sent > 0
    assert {each["exchanged_bytes"] for each in metrics} == {own.sent}
    assert {each["received_bytes"] for each in metrics} == {own.received}
    assert own.keys in [each.keys for each in choices]


def test_an_island_that_has_ended_waits_until_its_neighbours_have_read(time: Time) -> None:
    run = run_config(2).model_copy(update={"steps": 2})
    with LocalServer(run, time) as server:
        first, second = (OneIsland(server, run, index) for index in range(2))
        read, holds, get = threading.Event(), threading.Event(), second.island.client._read
        second.island.client._read = lambda neighbour: (holds.set(), read.wait(60), get(neighbour))[2]
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(each.step, 2) for each in (first, second)]
            assert holds.wait(60)
            sleep(0.3)
            assert not ends[0].done()
            read.set()
            [each.result(60) for each in ends]
        assert server.coordinator.meetings.meetings == {}


def test_the_status_and_the_report_show_who_waited_for_whom(time: Time) -> None:
    run = run_config(3)
    with LocalServer(run, time) as server:
        records, log = [], server.coordinator._log
        server.coordinator._log = lambda record: (records.append({"time": time.now, **record}), log(record))
        islands = opened(server, run, 3)
        with ThreadPoolExecutor(2) as pool:
            first = [pool.submit(meet, each) for each in islands[:2]]
            while len(server.pushes()) < 2:
                sleep(0.02)
            time.now += 1.5  # less than a heartbeat
            meet(islands[2])
            [each.result(60) for each in first]
        islands[2].island.client.leave()
        shown = status_table({"time": 0.0, **server.coordinator.status()}, 0.0)
    history = IslandsHistory(Path(), {}, records, {})
    assert history.waits() == {(0, 2): 1.5, (1, 2): 1.5}
    assert history.staleness() == {island: {0: 1} for island in range(3)}
    assert shown.startswith("updates 1, step 2\n")
    assert [line.split()[:3] for line in shown.splitlines()[2:]] == [[str(i), "2", "0"] for i in range(3)]
    assert [line.split()[-1] for line in shown.splitlines()[2:]][-1] == "gone"


REFUSED: list[tuple[list[str], str]] = [
    (["islands.servers=1"], "islands.servers: gossip is for islands without a server; expected 0"),
    (
        ["sync.gossip.graph=directed", "sync.gossip.edges=[[0,1],[1,0]]"],
        "sync.gossip.graph: islands have no weights of push-sum; expected ring, exponential or matching",
    ),
    (["sync.gossip.drop=0.1"], "sync.gossip.drop: islands have no weights of push-sum; expected 0"),
    (["islands.quorum=1"], "islands.quorum: islands that gossip wait for their neighbours alone; expected 0"),
    (["islands.grace=2"], "islands.grace: islands that gossip wait for their neighbours alone; expected 0"),
    (["islands.late=scale"], "islands.late: without a server late work is dropped; expected drop"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_islands_that_gossip_do_not_have_is_refused(overrides: list[str], message: str) -> None:
    given = ["islands.count=2", "islands.servers=0", "sync.strategy=gossip", *overrides]
    with pytest.raises(UserError) as found:
        jaxtrain.load("quickstart", *given)
    assert message in str(found.value)
