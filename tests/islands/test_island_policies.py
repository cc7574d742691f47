"""When pushes are merged and who may read, under random speeds, leaving and joining."""

from __future__ import annotations

import random

import pytest

from jaxtrain.islands.server.policies import Due, PartialRoundPolicy, RoundPolicy, StalePolicy
from jaxtrain.sync.clocks import Clocks


class Simulation:
    """Islands of random speeds under a policy, by events in virtual time.

    Attributes:
        begun: (island, iteration, slowest that was completed when it began).
        updates: islands whose pushes made each update.
    """

    def __init__(self, policy: StalePolicy, speeds: list[float], steps: int, seed: int) -> None:
        self.policy, self.speeds, self.steps = policy, speeds, steps
        self.random = random.Random(seed)
        self.begun: list[tuple[int, int, int]] = []
        self.updates: list[tuple[int, ...]] = []
        self.ends: dict[int, float] = {}
        self.number = 0
        for island in range(len(speeds)):
            policy.join(island, 0)
        for island in range(len(speeds)):
            self.begin(island, 0.0)

    def begin(self, island: int, now: float) -> None:
        clock = self.policy.completed[island]
        self.begun.append((island, clock, min(self.policy.completed.values())))
        self.ends[island] = now + (1 + self.random.random()) / self.speeds[island]

    def push_next(self) -> float:
        island = min(self.ends, key=lambda each: self.ends[each])
        now = self.ends.pop(island)
        self.number += 1
        self.policy.push(island, self.number, self.policy.completed[island] + 1)
        self.settle(now)
        return now

    def settle(self, now: float) -> None:
        while (due := self.policy.next(now)) is not None:
            if due.pushes:
                self.updates.append(tuple(island for island, _ in due.pushes))
            for reader in due.readers:
                if self.policy.completed[reader] < self.steps:
                    self.begin(reader, now)
                else:
                    self.policy.leave(reader)

    def run(self) -> None:
        while self.ends:
            self.push_next()


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_no_island_begins_further_ahead_than_the_bound(bound: int, seed: int) -> None:
    speeds = [random.Random(seed).uniform(0.2, 2) for _ in range(4)]
    simulation = Simulation(StalePolicy(bound, len(speeds)), speeds, 40, seed)
    simulation.run()
    assert max(clock - slowest for _, clock, slowest in simulation.begun) <= bound
    assert sum(map(len, simulation.updates)) == 4 * 40  # every push is in one update
    if bound == 0:
        assert simulation.updates == [(0, 1, 2, 3)] * 40
    else:  # the bound is used
        assert max(clock - slowest for _, clock, slowest in simulation.begun) == bound


def test_without_a_bound_nobody_waits() -> None:
    simulation = Simulation(StalePolicy(None, 3), [0.1, 1, 1], 30, 0)
    simulation.run()
    assert simulation.updates.count((0,)) == 30
    assert all(len(update) == 1 for update in simulation.updates)
    assert max(clock - slowest for _, clock, slowest in simulation.begun) > 10


@pytest.mark.parametrize("bound", [0, 2, None])
def test_the_rule_is_that_of_the_one_program(bound: int | None) -> None:
    """The same updates as `sync.clocks` for the same durations."""
    speeds, workers = [1.0, 0.3, 0.7], 3
    durations: dict[tuple[int, int], float] = {}

    def duration(worker: int, iteration: int) -> float:
        return durations.setdefault(
            (worker, iteration), (1 + random.Random(f"{worker} {iteration}").random()) / speeds[worker]
        )

    class OfDurations(Simulation):
        def begin(self, island: int, now: float) -> None:
            super().begin(island, now)
            self.ends[island] = now + duration(island, self.policy.completed[island])

    clocks = Clocks(workers, bound, duration)
    simulation = OfDurations(StalePolicy(bound, len(speeds)), speeds, 10**6, 0)
    while len(simulation.updates) < 60:
        simulation.push_next()
    for number, islands in enumerate(simulation.updates[:60]):
        pushes = clocks.update(number).pushes
        assert islands == tuple(worker for worker in range(workers) if pushes[worker])


def test_those_that_leave_are_not_waited_for_and_their_push_counts() -> None:
    policy = StalePolicy(0, 2)
    for island in range(3):
        policy.join(island, 5)
    policy.push(0, 1, 6)
    policy.push(2, 2, 6)
    assert policy.next(0.0) is None
    policy.leave(2)
    assert policy.next(0.0) is None
    policy.leave(1)
    assert policy.next(0.0) == Due([(0, 1), (2, 2)], [0])


def test_a_round_waits_for_all_or_for_its_quorum_and_a_grace() -> None:
    policy = RoundPolicy(0, 0.0, 3)
    for island in range(3):
        policy.join(island, 0)
    policy.push(2, 1, 4)
    policy.push(0, 2, 4)
    assert policy.next(1.0) is None
    policy.push(1, 3, 4)
    assert policy.next(1.0) == Due([(0, 2), (1, 3), (2, 1)], [0, 1, 2])
    policy = RoundPolicy(2, 3.0, 3)
    for island in range(3):
        policy.join(island, 0)
    policy.push(2, 1, 4)
    assert policy.next(0.0) is None
    policy.push(0, 2, 4)
    assert policy.next(1.0) is None  # the grace begins
    assert policy.next(3.9) is None
    assert policy.next(4.0) == Due([(0, 2), (2, 1)], [0, 2])
    assert policy.next(9.0) is None


def test_a_partial_round_takes_what_there_is_however_old() -> None:
    policy = PartialRoundPolicy(0, 0.0)
    for island in range(3):
        policy.join(island, 0)
    policy.push(2, 1, 4)
    assert policy.next(0.0) == Due([(2, 1)], [2])
    policy.push(2, 2, 8)
    policy.push(0, 3, 4)
    assert policy.next(0.0) == Due([(0, 3), (2, 2)], [0, 2])
    assert policy.merges_stale
    policy = PartialRoundPolicy(2, 1.0)
    for island in range(3):
        policy.join(island, 0)
    policy.push(2, 1, 4)
    assert policy.next(5.0) is None
    policy.push(1, 2, 4)
    assert policy.next(6.0) is None
    assert policy.next(7.0) == Due([(1, 2), (2, 1)], [1, 2])
