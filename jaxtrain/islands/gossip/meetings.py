"""Meetings of islands that gossip: who sends to whom, who is waited for, and when a message is no longer needed.

Meeting e of an island follows its step (e + 1) x `sync.every`. Who takes part is fixed when the first island comes to
it: all that train and have not been further. An island waits for those that send to it alone, so that islands may be
some meetings apart. One that leaves before it has sent is left out of the meetings that have begun. Plain logic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtrain.islands.peers.rounds import Standing
from jaxtrain.sync.gossip.graphs import Messages

Draw = Callable[[int, int], list[Messages]]


class Sent(NamedTuple):
    """Values that an island sends to a meeting.

    Attributes:
        refs: references to its values, one of each process of the island.
        is_finite: all of them are finite.
    """

    refs: list[Any]
    is_finite: bool


class Neighbour(NamedTuple):
    """An island that sends to another one.

    Attributes:
        island: its index.
        share: of its values that it sends.
        sent: these; None: it has left before.
    """

    island: int
    share: float
    sent: Sent | None


@dataclass
class Meeting:
    """An exchange along the edges of a round of the graph.

    Attributes:
        members: indices of those that take part, ascending; their places are those of the replicas of the graph.
        parts: messages of the round.
        present: members that have not finished it, and have not left.
        sent: by island; what is no longer needed is not kept.
        has_sent: those that have sent.
    """

    members: tuple[int, ...]
    parts: list[Messages]
    present: set[int] = field(default_factory=set)
    sent: dict[int, Sent] = field(default_factory=dict)
    has_sent: set[int] = field(default_factory=set)

    def senders(self, island: int) -> list[tuple[int, float]]:
        """Returns (who sends to an island, its share), in the order of the parts."""
        place, found = self.members.index(island), []
        for part in self.parts:
            found += [(self.members[s], float(part.share[s])) for s, receiver in part.edges if receiver == place]
        return found

    def receivers(self, island: int) -> list[int]:
        """Returns those to which an island sends."""
        place = self.members.index(island)
        return [self.members[r] for part in self.parts for sender, r in part.edges if sender == place]

    def shares(self, island: int) -> list[float]:
        """Returns the share that an island sends in each part."""
        place = self.members.index(island)
        return [float(part.share[place]) for part in self.parts]

    def is_waited_for(self, island: int) -> bool:
        """Returns whether a member may still send."""
        return island in self.present and island not in self.has_sent

    def is_complete(self, island: int) -> bool:
        """Returns whether all that send to an island have done so, or have left."""
        return not any(self.is_waited_for(sender) for sender, _ in self.senders(island))

    def end(self, island: int) -> None:
        """Takes one that has finished, or has left. Forgets messages that nobody needs any more."""
        self.present.discard(island)
        needed = [sender for sender in self.sent if self.present.intersection(self.receivers(sender))]
        self.sent = {sender: self.sent[sender] for sender in needed}


class Meetings:
    """Decides about the islands that are there.

    Args:
        islands: of the run, all of which the first meeting waits for.
        draw: (members, number of the meeting) -> messages of it.

    Attributes:
        standings: of the islands that are there.
        next: number of the next meeting of those that train, or of which they had come when they began to wait.
        meetings: by number, those that somebody has come to and that are not over.
    """

    def __init__(self, islands: int, draw: Draw) -> None:
        self._islands, self._draw = islands, draw
        self.standings: dict[int, Standing] = {}
        self.next: dict[int, int] = {}
        self.meetings: dict[int, Meeting] = {}
        self._asking: set[int] = set()
        self._giver: int | None = None  # its values are wanted
        self._starting: dict[int, bool] = {}  # whether they have trained in this run of their process
        self._has_begun = False

    @property
    def training(self) -> list[int]:
        """Islands that train, from which others may get values."""
        return [island for island, standing in self.standings.items() if standing == Standing.TRAINS]

    @property
    def waiting(self) -> list[int]:
        """Islands that have asked for the values of another one."""
        return sorted(self._asking)

    @property
    def first(self) -> int:
        """Number of the next meeting of the slowest island that trains; 0 if none does."""
        return min((self.next[island] for island in self.training), default=0)

    def join(self, island: int) -> None:
        """Adds an island, which then starts or asks for the values of another one."""
        self.standings[island] = Standing.STARTS
        self._asking.discard(island)

    def leave(self, island: int) -> None:
        """Removes an island."""
        self.standings.pop(island, None)
        self.next.pop(island, None)
        self._starting.pop(island, None)
        self._asking.discard(island)
        self._giver = None if self._giver == island else self._giver
        self._end_all(island)

    def start(self, island: int, number: int, has_trained: bool) -> None:
        """Takes an island that says where it is.

        Args:
            island: its index.
            number: of its next meeting.
            has_trained: its process has been among the others before.
        """
        if self.standings[island] == Standing.TRAINS:
            self._go_to(island, number)
        elif self.training:
            self._stand(island, number, number >= self.first)
        else:
            self.standings[island], self.next[island], self._starting[island] = Standing.STARTS, number, has_trained

    def begin(self, has_waited: bool) -> None:
        """Lets those that start begin, if all are there; those that begin anew and are not the furthest wait.

        Args:
            has_waited: they have waited long enough for others.
        """
        if self.training or not self._starting:
            return
        are_all_there = self._starting.keys() == self.standings.keys()
        if not has_waited and not (are_all_there and (self._has_begun or len(self._starting) >= self._islands)):
            return
        starting, self._starting, self._has_begun = self._starting, {}, True
        furthest = max(self.next[island] for island in starting)
        for island, has_trained in starting.items():
            self._stand(island, self.next[island], has_trained or self.next[island] == furthest)

    def _stand(self, island: int, number: int, trains: bool) -> None:
        self.standings[island], self.next[island] = Standing.TRAINS if trains else Standing.WAITS, number

    def ask(self, island: int) -> None:
        """Takes an island that waits for the values of another one; nobody waits for it."""
        self.standings[island] = Standing.WAITS
        self.next.setdefault(island, 0)
        self._starting.pop(island, None)
        self._asking.add(island)
        self._end_all(island)

    def come(self, island: int, number: int, sent: Sent) -> Meeting | None:
        """Takes what an island sends to a meeting. Returns the meeting; None if it goes on without the island."""
        self._go_to(island, number)
        if number not in self.meetings:
            members = tuple(sorted(each for each in self.training if self.next[each] <= number))
            self.meetings[number] = Meeting(members, self._draw(len(members), number), set(members))
        meeting = self.meetings[number]
        if island not in meeting.present:
            return None
        if island not in meeting.has_sent:
            meeting.has_sent.add(island)
            meeting.sent[island] = sent
        return meeting

    def finish(self, island: int, number: int) -> bool:
        """Takes an island that has what it gets from a meeting. Returns whether others want its values."""
        self._go_to(island, number + 1)
        if self._giver is None and self.waiting and all(self.next[each] <= number for each in self.waiting):
            self._giver = island
        return self._giver == island

    def give(self, island: int) -> list[int]:
        """Lets those begin that wait for values, which an island has given. Returns them."""
        self._giver, number = None, self.next[island]
        found = [each for each in self.waiting if self.next[each] < number]
        for each in found:
            self._stand(each, number, True)
        self._asking.difference_update(found)
        return found

    def is_needed(self, island: int) -> bool:
        """Returns whether somebody has still to read what an island has sent."""
        return any(island in meeting.sent for meeting in self.meetings.values())

    def _go_to(self, island: int, number: int) -> None:
        """Makes a meeting the next one of an island: those before go on without it."""
        self.next[island] = number
        for each in [each for each in self.meetings if each < number]:
            self._end(each, island)

    def _end_all(self, island: int) -> None:
        for number in list(self.meetings):
            self._end(number, island)

    def _end(self, number: int, island: int) -> None:
        self.meetings[number].end(island)
        if not self.meetings[number].present:
            del self.meetings[number]
