"""Clocks of workers: the bound holds whatever the durations are, and every update is a pure function of its number."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxtrain.sync.clocks import BLOCK, Clocks, Durations, ServerUpdate, random_durations

HISTORIES = 12  # random ones, for each bound


def updates(clocks: Clocks, count: int) -> list[ServerUpdate]:
    return [clocks.update(number) for number in range(count)]


def chaotic(rng: np.random.Generator, workers: int) -> Durations:
    """Speeds that differ by a factor of up to 100, heavy tails, equal durations now and then, and stalls."""
    speeds = 10 ** rng.uniform(-1, 1, workers)
    seed, stalled = int(rng.integers(1 << 30)), int(rng.integers(workers))

    def duration(worker: int, iteration: int) -> float:
        draw = np.random.default_rng((seed, worker, iteration))
        if worker == stalled and iteration % 17 == 5:
            return 1000.0
        return 1.0 if draw.random() < 0.2 else float(draw.exponential() + 1e-6) / speeds[worker]

    return duration


class Replay:
    """Workers as the updates tell of them: at each read the clock of the reader and the slowest completed one."""

    def __init__(self, workers: int) -> None:
        self.completed = [0] * workers
        self.running = [0] * workers  # the iteration that each computes
        self.read_at = [0] * workers
        self.lead = 0  # largest clock - slowest, at any read

    def apply(self, number: int, update: ServerUpdate) -> None:
        assert any(update.pushes)
        assert any(update.reads)
        for worker, clock in enumerate(update.clocks):
            if clock >= 0:
                assert clock == self.running[worker] == self.completed[worker]  # each iteration once, in order
                assert update.staleness[worker] == number - self.read_at[worker]
                self.completed[worker] += 1
            else:
                assert update.staleness[worker] == 0
        assert update.completed == sum(self.completed)
        for worker, is_reading in enumerate(update.reads):
            if is_reading:
                assert self.completed[worker] > self.running[worker]  # it has pushed what it read for before
                self.running[worker] = self.completed[worker]
                self.read_at[worker] = number + 1
                self.lead = max(self.lead, self.completed[worker] - min(self.completed))


@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_no_worker_is_ever_further_ahead_than_the_bound(bound: int | None) -> None:
    """With random speeds, ties and a stalled worker; the bound is reached, and without one it is passed."""
    rng, leads = np.random.default_rng(0 if bound is None else bound + 1), []
    for _ in range(HISTORIES):
        workers = int(rng.integers(2, 7))
        replay, before = Replay(workers), 0.0
        for number, update in enumerate(updates(Clocks(workers, bound, chaotic(rng, workers)), 300)):
            replay.apply(number, update)
            assert update.time >= before
            before = update.time
            waiting = [w for w in range(workers) if replay.completed[w] > replay.running[w]]
            if bound is not None:  # one that waits may not go on yet
                assert all(replay.completed[w] > min(replay.completed) + bound for w in waiting)
            else:
                assert not waiting
        leads.append(replay.lead)
    assert max(leads) > 20 if bound is None else max(leads) == bound


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 5.0, 0.1)])
def test_with_a_bound_of_0_every_update_is_that_of_all_workers(speeds: tuple[float, ...]) -> None:
    for number, update in enumerate(updates(Clocks(3, 0, random_durations(speeds, 0.7, 1)), 200)):
        assert update[:3] == ((number,) * 3, (0,) * 3, (True,) * 3)


def test_workers_of_one_speed_are_bsp_under_any_bound() -> None:
    """Their pushes come at the same time, and no read separates them."""
    for bound in (2, None):
        for number, update in enumerate(updates(Clocks(4, bound, random_durations([2.0] * 4, 0.0, 1)), 50)):
            assert update[:4] == ((number,) * 4, (0,) * 4, (True,) * 4, 4 * number + 4)
            assert update.time == pytest.approx((number + 1) / 2)


def test_one_worker_without_a_bound_is_serial() -> None:
    for number, update in enumerate(updates(Clocks(1, None, random_durations([1.0], 3.0, 1)), 100)):
        assert update[:3] == ((number,), (0,), (True,))


def test_asynchronous_workers_push_alone_and_as_often_as_they_are_fast() -> None:
    found = updates(Clocks(3, None, random_durations([1.0, 2.0, 4.0], 0.5, 3)), 7000)
    assert all(sum(update.pushes) == 1 and update.reads == update.pushes for update in found)
    counts = np.sum([update.pushes for update in found], 0)
    np.testing.assert_allclose(counts, [1000, 2000, 4000], rtol=0.05)
    mean = [np.mean([u.staleness[w] for u in found if u.pushes[w]]) for w in range(3)]
    np.testing.assert_allclose(mean, [6, 2.5, 0.75], rtol=0.1)  # updates of the others meanwhile


def test_a_worker_that_is_never_done_leaves_the_others_to_the_bound() -> None:
    """The others stop at the bound: without it they go on."""

    def endless(worker: int, iteration: int) -> float:
        return 1e9 if worker == 0 else 1.0 + worker / 8

    for bound in (0, 2):
        replay = Replay(3)
        for number, update in enumerate(updates(Clocks(3, bound, endless), 2 * bound + 1)):
            if update.time >= 1e9:
                break
            replay.apply(number, update)
            assert max(replay.running) <= bound
    assert all(not update.pushes[0] for update in updates(Clocks(3, None, endless), 1000))


@pytest.mark.parametrize("bound", [2, None])
def test_an_update_is_a_function_of_seed_and_number(bound: int | None) -> None:
    """In any order of the questions, from any start, and another one for another seed."""

    def clocks(seed: int) -> Clocks:
        return Clocks(3, bound, random_durations([1.0, 1.5, 0.4], 0.3, seed))

    count = BLOCK * 6 + 100
    expected, asked = updates(clocks(5), count), clocks(5)
    for number in (count - 1, 0, BLOCK - 1, BLOCK, 3 * BLOCK + 7, count - 2, BLOCK + 1, 5):
        assert asked.update(number) == expected[number]
        assert clocks(5).update(number) == expected[number]
    assert updates(clocks(6), 50) != expected[:50]


def test_a_step_far_on_is_found_fast_enough_to_resume() -> None:
    begin = time.process_time()
    Clocks(4, 3, random_durations([1.0, 2.0, 3.0, 4.0], 0.5, 0)).update(100_000)
    assert time.process_time() - begin < 30  # about one second on an idle core


def test_durations_are_within_their_jitter() -> None:
    durations: Callable[[int, int], float] = random_durations([1.0, 0.25], 0.5, 7)
    drawn: Any = np.array([[durations(worker, iteration) for iteration in range(600)] for worker in (0, 1)])
    assert drawn[0].min() >= 1
    assert drawn[0].max() < 1.5
    assert drawn[0].mean() == pytest.approx(1.25, abs=0.02)
    assert drawn[1].mean() == pytest.approx(5, abs=0.1)
    assert len(set(drawn.ravel())) == drawn.size
