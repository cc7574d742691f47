"""Meetings of islands that gossip, without the islands: who is in them, who is waited for, and what is kept."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.islands.gossip.meetings import Meeting, Meetings, Sent
from jaxtrain.islands.peers.rounds import Standing
from jaxtrain.sync.gossip.graphs import Messages, messages_of, mixing_matrix, round_number

pytestmark = pytest.mark.timeout(120)
GRAPHS = ("ring", "exponential", "matching")


def draw(graph: str):
    def messages(members: int, number: int) -> list[Messages]:
        return [] if members == 1 else messages_of(graph, members, round_number(graph, members, number, 5))

    return messages


def training(count: int, graph: str = "ring") -> Meetings:
    meetings = Meetings(count, draw(graph))
    for island in range(count):
        meetings.join(island)
        meetings.start(island, 0, False)
    meetings.begin(False)
    assert meetings.training == list(range(count))
    return meetings


def sent(island: int, number: int) -> Sent:
    return Sent([(island, number)], True)


def come(meetings: Meetings, island: int, number: int) -> Meeting:
    meeting = meetings.come(island, number, sent(island, number))
    assert meeting is not None
    return meeting


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_shares_are_those_of_the_matrix_of_the_graph(graph: str, count: int) -> None:
    meetings = training(count, graph)
    for number in range(4):
        found = np.zeros((count, count))
        meeting, *_ = [come(meetings, island, number) for island in range(count)]
        for island in range(count):
            assert meeting.is_complete(island)
            found[island, island] = 1 - sum(meeting.shares(island))
            for sender, share in meeting.senders(island):
                found[island, sender] += share
                assert island in meeting.receivers(sender)
        expected = mixing_matrix(draw(graph)(count, number), count)
        np.testing.assert_allclose(found, expected, atol=1e-7)
        for island in range(count):
            meetings.finish(island, number)
        assert meetings.meetings == {}


def test_the_first_meeting_waits_for_all_islands() -> None:
    meetings = Meetings(2, draw("ring"))
    meetings.join(0)
    meetings.start(0, 0, False)
    meetings.begin(False)
    assert meetings.training == []
    meetings.begin(True)  # it has waited long enough
    assert meetings.training == [0]
    meeting = come(meetings, 0, 0)
    assert meeting.members == (0,)
    assert meeting.is_complete(0)


def started(numbers: tuple[int, ...], has_trained: bool) -> Meetings:
    """Meetings to which all islands have said where they are."""
    meetings = Meetings(len(numbers), draw("ring"))
    for island, number in enumerate(numbers):
        meetings.join(island)
        meetings.start(island, number, has_trained)
    meetings.begin(False)
    return meetings


def test_those_behind_the_furthest_wait_for_its_values_when_all_start_again() -> None:
    meetings = started((4, 7, 7), has_trained=False)
    assert meetings.training == [1, 2]
    assert meetings.standings[0] == Standing.WAITS
    meetings.ask(0)
    come(meetings, 1, 7)
    come(meetings, 2, 7)
    assert meetings.finish(2, 7)
    assert not meetings.finish(1, 7)  # one is enough
    assert meetings.give(2) == [0]
    assert meetings.next == {0: 8, 1: 8, 2: 8}
    assert come(meetings, 1, 8).members == (0, 1, 2)


def test_islands_that_tell_a_new_coordinator_where_they_are_go_on_from_there() -> None:
    meetings = started((4, 5, 5), has_trained=True)
    assert meetings.training == [0, 1, 2]
    meeting = come(meetings, 0, 4)
    assert meeting.members == (0,)  # the others have been there
    assert meeting.is_complete(0)


def test_a_slow_island_holds_up_its_neighbours_alone() -> None:
    """In a ring of six, of which island 0 does not come, 3 can have two meetings: 2 and 4 one, and 1 and 5 none."""
    meetings = training(6)
    number = dict.fromkeys(range(1, 6), 0)
    for _ in range(20):
        for island in number:
            if come(meetings, island, number[island]).is_complete(island):
                meetings.finish(island, number[island])
                number[island] += 1
    assert number == {1: 0, 2: 1, 3: 2, 4: 1, 5: 0}
    assert meetings.first == 0


def test_an_island_that_comes_late_is_a_member_of_later_meetings() -> None:
    meetings = training(3)
    come(meetings, 0, 0)
    meetings.join(3)
    meetings.start(3, 0, False)
    assert meetings.standings[3] == Standing.TRAINS  # nobody is further
    assert meetings.come(3, 0, sent(3, 0)) is None  # the meeting has begun without it
    meetings.finish(3, 0)
    assert come(meetings, 3, 1).members == (0, 1, 2, 3)


def test_a_giver_that_leaves_is_replaced() -> None:
    meetings = training(3)
    for island in range(3):
        come(meetings, island, 0)
    meetings.join(3)
    meetings.ask(3)
    assert meetings.finish(0, 0)
    meetings.leave(0)
    assert meetings.finish(1, 0)
    assert meetings.give(1) == [3]


def test_one_that_waits_gets_no_values_that_are_older_than_its_own() -> None:
    meetings = training(2)
    meetings.next |= {0: 3, 1: 5}
    meetings.join(2)
    meetings.start(2, 2, False)
    meetings.ask(2)
    meetings.next[2] = 4  # as after a start with others that have left since
    come(meetings, 0, 3)
    assert not meetings.finish(0, 3)
    come(meetings, 0, 4)
    assert meetings.finish(0, 4)


def test_one_that_skips_meetings_is_not_waited_for() -> None:
    meetings = training(2)
    first = come(meetings, 0, 0)
    assert not first.is_complete(0)
    come(meetings, 1, 3)
    assert first.is_complete(0)


def test_a_message_is_kept_until_its_receivers_have_it() -> None:
    meetings = training(4)
    for island in range(4):
        come(meetings, island, 0)
    meetings.finish(1, 0)
    assert meetings.is_needed(0)
    meetings.finish(3, 0)  # 0 sends to 1 and 3
    assert not meetings.is_needed(0)
    assert meetings.is_needed(1)  # 2 has not read it yet
    meetings.leave(2)
    assert meetings.is_needed(1)  # nor 0
    meetings.finish(0, 0)
    assert not meetings.is_needed(1)
    assert meetings.meetings == {}


@dataclass
class Process:
    """An island as its process knows it: at which meeting it is, and what it does."""

    number: int
    does: str = "starts"
    has_trained: bool = False
    meeting: Meeting | None = None


class Islands:
    """Islands that train, die and come back in any order."""

    def __init__(self, count: int, graph: str, seed: int) -> None:
        self.random, self.count, self.graph = random.Random(seed), count, graph
        self.meetings = Meetings(count, draw(graph))
        self.living: dict[int, Process] = {}
        self.saved = [0] * count
        self.finished = self.mixed = 0

    def step(self, with_faults: bool = True) -> None:
        island = self.random.randrange(self.count)
        process = self.living.get(island)
        if process is None:
            self.living[island] = Process(self.saved[island])
            self.meetings.join(island)
        elif with_faults and self.random.random() < 0.02:
            self._fail(island, process)
        else:
            getattr(self, process.does)(island, process)
        self._check_memory()

    def _fail(self, island: int, process: Process) -> None:
        if self.random.random() < 0.1:  # the coordinator loses all, and the islands join again
            self.meetings = Meetings(self.count, draw(self.graph))
            for each, other in self.living.items():
                self.meetings.join(each)
                other.does, other.meeting = "starts", None
            return
        self.meetings.leave(island)
        if self.random.random() < 0.3:  # it was silent
            self.meetings.join(island)
            process.does, process.meeting = "starts", None
            return
        self.saved[island] = self.random.choice([self.saved[island], process.number])
        del self.living[island]

    def starts(self, island: int, process: Process) -> None:
        if self.meetings.standings[island] == Standing.STARTS:
            self.meetings.start(island, process.number, process.has_trained)
            self.meetings.begin(self.random.random() < 0.3)
        elif self.meetings.standings[island] == Standing.WAITS:
            self.meetings.ask(island)
            process.does = "waits"
        elif self.meetings.standings[island] == Standing.TRAINS:
            process.does, process.has_trained = "trains", True

    def waits(self, island: int, process: Process) -> None:
        if self.meetings.standings[island] == Standing.TRAINS:
            assert self.meetings.next[island] > process.number
            process.number, process.does = self.meetings.next[island], "starts"
        elif not self.meetings.training:
            self.meetings.join(island)
            process.does = "starts"

    def trains(self, island: int, process: Process) -> None:
        is_new = process.number not in self.meetings.meetings
        expected = sorted(i for i in self.meetings.training if self.meetings.next[i] <= process.number)
        process.meeting = self.meetings.come(island, process.number, sent(island, process.number))
        if is_new:
            assert process.meeting is not None
            assert list(process.meeting.members) == expected
            assert island in expected
        process.does = "meets"

    def meets(self, island: int, process: Process) -> None:
        meeting, number = process.meeting, process.number
        if meeting is not None:
            if not meeting.is_complete(island):
                return
            for sender, share in meeting.senders(island):
                assert sender in meeting.members
                assert 0 < share < 1
                if sender in meeting.has_sent:
                    assert meeting.sent[sender].refs == [(sender, number)]
                    self.mixed += 1
                else:
                    assert sender not in meeting.present  # it has left
        is_wanted = self.meetings.finish(island, number)
        process.number, process.does, process.meeting = number + 1, "trains", None
        self.finished += 1
        if is_wanted:
            assert self.meetings.give(island)

    def _check_memory(self) -> None:
        for number, meeting in self.meetings.meetings.items():
            assert meeting.present
            for island in meeting.present:
                assert self.meetings.next[island] <= number
            for sender in meeting.sent:
                assert meeting.present & set(meeting.receivers(sender)) or sender in meeting.present


@given(st.integers(1, 6), st.sampled_from(GRAPHS), st.integers(0, 1 << 30))
def test_islands_go_on_whoever_dies_and_nothing_old_is_kept(count: int, graph: str, seed: int) -> None:
    islands = Islands(count, graph, seed)
    for _ in range(500):
        islands.step()
    target = max([process.number for process in islands.living.values()] + islands.saved) + 3
    for _ in range(4000):
        islands.step(with_faults=False)
        if len(islands.living) == count and all(process.number >= target for process in islands.living.values()):
            break
    assert all(process.number >= target for process in islands.living.values())  # nobody waits for ever
    assert len(islands.living) == count


def test_most_of_a_long_simulation_is_meetings() -> None:
    islands = Islands(4, "ring", 7)
    for _ in range(20000):
        islands.step()
    assert islands.finished > 4000
    assert islands.mixed > islands.finished  # of two neighbours each, few are missing
