"""Islands that join late, leave, fall silent, come back with old work, or do not fit."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep
from typing import Any

import jax
import numpy as np
import pytest
import tiny_net
from local_islands import LocalServer, Rows, island_program

from jaxtrain.core.placement import Placer
from jaxtrain.islands.callback import open_island
from jaxtrain.islands.members import START_WAIT
from jaxtrain.islands.messages import RefusedError, SessionOverError
from jaxtrain.islands.rows import IslandRows
from jaxtrain.islands.status import status_table
from jaxtrain.islands.synchronizer import IslandSynchronizer
from jaxtrain.launch.islands.run import summary

LOCAL = {"strategy": "local_sgd", "every": 2}
ASP = {"strategy": "asp"}
SGD = {"name": "sgd", "lr": 0.05, "betas": [0.0, 0.9], "weight_decay": 0.0, "grad_clip_norm": None}


class Time:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class OneIsland:
    """An island whose steps a test takes one by one."""

    def __init__(self, server: LocalServer, config: Any, index: int) -> None:
        program = island_program(config, {}, index)
        self.island: IslandSynchronizer = open_island(config, program, index, server.door)
        self.clock = self.island.client.join()
        self.program = replace(program, synchronizer=self.island)
        rows = program.config.data.global_batch
        self.place = Placer(IslandRows(Rows(), index, rows).batch, program.sharder, rows, False)
        self.state = self.island.start(program.init())

    def step(self, count: int = 1) -> dict[str, float]:
        for _ in range(count):
            self.state, metrics = self.program.step_at(self.clock)(self.state, self.place(self.clock))
            self.clock += 1
        return {name: float(value) for name, value in metrics.items()}

    @property
    def params(self) -> Any:
        return jax.device_get(self.state["params"])


def config(sync: dict[str, Any], count: int = 2, **islands: Any) -> Any:
    return tiny_net.config(sync=sync, islands={"count": count, "heartbeat": 5.0, **islands}, optimizer=SGD)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def asynchronous(time: Time) -> Iterator[tuple[Any, LocalServer]]:
    run = config(ASP)
    with LocalServer(run, time) as server:
        yield run, server


@pytest.mark.parametrize("sync", [LOCAL, {"strategy": "bsp"}])
def test_the_first_update_waits_for_all_islands(time: Time, sync: dict[str, Any]) -> None:
    """One that is faster to start does not train alone."""
    run = config(sync)
    with LocalServer(run, time) as server, ThreadPoolExecutor(1) as pool:
        first = OneIsland(server, run, 0)
        trained = pool.submit(first.step, 2)
        sleep(0.5)
        assert server.coordinator.version == 0
        second = OneIsland(server, run, 1)
        assert second.clock == 0
        second.step(2)
        trained.result(60)
        updates = [record["islands"] for record in server.log if record["event"] == "update"]
        assert set(updates) == {(0, 1)}


def test_an_island_that_is_alone_waits_a_while_for_those_that_never_come(time: Time) -> None:
    run = config(LOCAL, heartbeat=START_WAIT)
    with LocalServer(run, time) as server, ThreadPoolExecutor(1) as pool:
        first = OneIsland(server, run, 0)
        trained = pool.submit(first.step, 4)
        sleep(0.2)
        assert server.coordinator.version == 0
        time.now += START_WAIT
        server.door.call("check_silence")
        trained.result(60)
        assert server.coordinator.version == 2


def test_a_late_island_begins_with_the_parameters_and_the_step_of_the_others(asynchronous: Any) -> None:
    run, server = asynchronous
    first = OneIsland(server, run, 0)
    first.step(6)
    late = OneIsland(server, run, 1)
    assert late.clock == 6
    late.state = late.island.begun(late.state, late.clock)
    for name, expected in first.params.items():
        np.testing.assert_array_equal(late.params[name], expected)
    late.step()
    assert server.coordinator.version == 7


def test_an_island_that_comes_again_in_a_round_takes_part_in_it(time: Time) -> None:
    """Those that have pushed wait for it: it must not begin with their next round."""
    run = config(LOCAL)
    with LocalServer(run, time) as server, ThreadPoolExecutor(1) as pool:
        first, killed = OneIsland(server, run, 0), OneIsland(server, run, 1)
        first.state, killed.state = first.island.begun(first.state, 0), killed.island.begun(killed.state, 0)
        waiting = pool.submit(first.step, 2)
        killed.step(2)
        waiting.result(60)
        waiting = pool.submit(first.step, 2)
        while len(server.pushes()) < 3:
            assert not waiting.done()
        again = OneIsland(server, run, 1)
        assert again.clock == 2
        again.state = again.island.with_values(again.state, again.island.client.read())
        again.step(2)
        waiting.result(60)
        updates = [record["islands"] for record in server.log if record["event"] == "update"]
        assert updates == [(0, 1), (0, 1)]
        for name, expected in first.params.items():
            np.testing.assert_array_equal(again.params[name], expected)


def test_an_island_that_begins_further_than_the_bound_waits(time: Time) -> None:
    """One whose own checkpoint is ahead of the others."""
    run = config({"strategy": "ssp", "stale": {"bound": 2}})
    with LocalServer(run, time) as server, ThreadPoolExecutor(1) as pool:
        first, ahead = OneIsland(server, run, 0), OneIsland(server, run, 1)
        ahead.clock = 5
        waiting = pool.submit(ahead.step)
        first.step(2)
        sleep(0.5)
        early = [push["island"] for push in server.pushes()]
        first.step(2)  # at 3 completed steps the other may begin the one after 5, and at 4 the next one
        waiting.result(60)
        assert early == [0, 0]
        pushed = next(push for push in server.pushes() if push["island"] == 1)
        assert pushed["clock"] == 6
        assert pushed["ahead"] <= 2


def test_a_silent_island_has_left_and_its_late_work_is_dropped_and_counted(time: Time) -> None:
    run = config(LOCAL)
    with LocalServer(run, time) as server:
        first, second = OneIsland(server, run, 0), OneIsland(server, run, 1)
        first.state, second.state = first.island.begun(first.state, 0), second.island.begun(second.state, 0)
        second.step(1)
        time.now = 11.0
        first.island.client.beat()
        server.door.call("check_silence")
        assert sorted(server.coordinator.members) == [0]
        first.step(6)  # three rounds alone
        second.step(1)  # its round is over long since
        assert second.island.behind == 6
        for name, expected in first.params.items():
            np.testing.assert_array_equal(second.params[name], expected)
        status = server.coordinator.status()["islands"]["1"]
        assert (status["late"], status["dropped"]) == (1, 1)
        assert [record["counts"] for record in server.log if record["event"] == "late"] == [False]
        second.clock = second.island.behind
        assert sorted(server.coordinator.members) == [0, 1]  # and is waited for again


def test_a_coordinator_that_stood_still_takes_nobody_for_silent(time: Time) -> None:
    with LocalServer(config(LOCAL), time) as server:
        OneIsland(server, config(LOCAL), 0), OneIsland(server, config(LOCAL), 1)
        time.now = 30.0
        server.door.call("check_silence", 29.0)
        assert sorted(server.coordinator.members) == [0, 1]
        time.now = 40.1
        server.door.call("check_silence")
        assert not server.coordinator.members


def test_late_work_may_be_scaled_down(time: Time) -> None:
    run = config(ASP, late="scale")
    with LocalServer(run, time) as server:
        first, second = OneIsland(server, run, 0), OneIsland(server, run, 1)
        first.step(1)
        second.step(1)
        time.now = 11.0
        first.island.client.beat()
        server.door.call("check_silence")
        first.step(2)  # two updates since the read of the second one
        before = first.params
        gradients = jax.jit(lambda s, b: second.program.step_with_gradients(s, b)[2])(second.state, second.place(1))
        second.step(1)
        assert [push["scale"] for push in server.pushes()][-1] == pytest.approx(1 / 3)
        for name, after in second.params.items():  # half: one of two islands
            expected = before[name] - 0.05 * np.asarray(gradients[name]) / 3 / 2
            np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-7)


def test_a_message_of_an_earlier_stay_has_no_effect(asynchronous: Any) -> None:
    run, server = asynchronous
    first = OneIsland(server, run, 0)
    first.step(1)
    session = server.coordinator.members[0].session
    OneIsland(server, run, 0)  # started again
    for method, arguments in (("heartbeat", ()), ("pull", ()), ("leave", ())):
        with pytest.raises(SessionOverError):
            server.door.call(method, 0, session, *arguments)
    assert sorted(server.coordinator.members) == [0]


def test_a_full_disk_at_a_server_is_said_and_all_go_on(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(ASP, count=1)
    with LocalServer(run, time, save_every=2) as server:
        save = server.servers.save

        async def full(record: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(server.servers, "save", full)
        island = OneIsland(server, run, 0)
        island.step(3)
        text = "the servers could not save after 2 steps: No space left on device"
        assert text in status_table({**server.coordinator.status(), "time": 0.0}, 0.0).splitlines()
        assert summary(server.coordinator.status()).endswith(text)
        monkeypatch.setattr(server.servers, "save", save)
        island.step(1)
        assert server.coordinator.status()["problem"] == ""
        assert [record["event"] for record in server.log if "save" in record["event"]] == ["save failed", "save"]


def test_a_push_that_is_not_finite_is_left_out_and_the_island_goes_on(time: Time) -> None:
    run = config(LOCAL)
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(2)]
        for each in islands:
            each.state = each.island.begun(each.state, 0)
        islands[1].state["params"]["a"] = islands[1].state["params"]["a"] * np.nan
        islands[0].island.client.leave()  # so that the test's one thread need not wait for it
        before = jax.device_get(islands[1].state["sync"]["agreed"])
        metrics = islands[1].step(2)
        assert metrics["left_out"] == 1
        for name, expected in before.items():
            np.testing.assert_array_equal(islands[1].params[name], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"options": {"noise": 0.5}}}, None),
        ({"optimizer": {"lr": 0.1}}, None),
        ({"seed": 3}, "island 1: its seed is 3; expected 0, as island 0 has"),
        ({"sync": {"strategy": "local_sgd", "every": 3}}, "island 1: its sync is"),
        ({"data": {"global_batch": 8}}, "island 1: its global_batch is 8; expected 16"),
    ],
)  # fmt: skip
def test_an_island_that_trains_something_else_is_refused_in_one_line(
    time: Time, changes: dict[str, Any], message: str | None
) -> None:
    run = config(LOCAL)
    with LocalServer(run, time) as server:
        OneIsland(server, run, 0)
        base = {"sync": LOCAL, "islands": {"count": 2, "heartbeat": 5.0}}
        other = tiny_net.config(**(base | changes))
        program = island_program(other, {}, 1)
        island = open_island(other, program, 1, server.door)
        if message is None:
            island.client.join()
            return
        with pytest.raises(RefusedError) as found:
            island.client.join()
        assert str(found.value).startswith(message)
        assert "\n" not in str(found.value)
        assert sorted(server.coordinator.members) == [0]


def test_an_index_outside_of_the_count_is_refused(time: Time) -> None:
    run = config(LOCAL)
    with LocalServer(run, time) as server:
        wrong = open_island(run, island_program(run, {}, 0), 7, server.door)
        with pytest.raises(RefusedError, match=r"island 7: expected a number below islands\.count=2"):
            wrong.client.join()
