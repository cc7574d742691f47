"""The coordinator of islands that gossip: it says who sends to whom, and passes on references. It has no parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtrain.config.sections.islands import IslandsConfig
from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.islands.gossip.meetings import Meeting, Meetings, Neighbour, Sent
from jaxtrain.islands.members import START_WAIT, BaseCoordinator, Member
from jaxtrain.islands.messages import Hello, NobodyError, Welcome
from jaxtrain.islands.peers.rounds import Standing
from jaxtrain.islands.status import NOBODY
from jaxtrain.sync.gossip.graphs import Messages, messages_of, round_number


class Come(NamedTuple):
    """An island that comes to a meeting.

    Attributes:
        number: of the meeting.
        clock: steps of the island.
        tokens: that it has trained on since its last one.
        loss: of its last step, for the status.
        sent: to those that it sends to.
    """

    number: int
    clock: int
    tokens: float
    loss: float | None
    sent: Sent


class Gathered(NamedTuple):
    """A meeting, as one of its islands sees it.

    Attributes:
        neighbours: those that send to it.
        shares: that it sends itself, in each part of the round.
        receivers: number of those to which it sends.
    """

    neighbours: list[Neighbour]
    shares: list[float]
    receivers: int


class GossipCoordinator(BaseCoordinator):
    """State and decisions; every method is called in one thread.

    Args:
        config: section `islands`.
        sync: section `sync`.
        log: takes a record of each event.
        now: clock, seconds.
    """

    def __init__(
        self, config: IslandsConfig, sync: SyncConfig, log: Callable[[dict[str, Any]], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__(config, log, now)
        self._sync, self._every = sync, int(sync.every)
        self.meetings = Meetings(config.count, self._messages)
        self.version = 0  # meetings that the furthest island has finished
        self._given: dict[int, tuple[int, list[Any]]] = {}  # (clock, references) for an island that has asked
        self._came: dict[int, int] = {}  # last meeting to which each island came, and that is in the log
        self._cause: dict[int, int] = {}  # for whom an island has waited that has not finished its meeting

    def _messages(self, members: int, number: int) -> list[Messages]:
        gossip = self._sync.gossip
        if members == 1:
            return []
        return messages_of(gossip.graph, members, round_number(gossip.graph, members, number, gossip.seed))

    async def join(self, hello: Hello, clock: int = 0) -> Welcome:
        """Lets an island take part. Raises RefusedError if it does not fit the others."""
        self._check_index(hello)
        member = self._admit(hello, self.version)
        if self._starts_by is None:
            self._starts_by = self._now() + START_WAIT
        self.meetings.join(hello.island)
        first = self.meetings.first * self._every
        self._log({"event": "join", "island": hello.island, "clock": first, "version": self.version})
        await self._advance()
        return Welcome(member.session, first, [], [] if self.meetings.training else None, self.version)

    async def start(self, island: int, session: int, number: int, has_trained: bool) -> bool | None:
        """Returns whether an island goes on from its own values; None after a while, to be asked again.

        Args:
            island: its index.
            session: of its stay.
            number: of its next meeting.
            has_trained: its process has been among the others before.
        """
        member, meetings = self._members.find(island, session), self.meetings
        if meetings.standings[island] != Standing.WAITS:
            meetings.start(island, number, has_trained)
            member.read_at, self.version = number, max(self.version, number)
            self._given.pop(island, None)
            await self._advance()

        def begun() -> Standing | None:
            standing = meetings.standings[island]
            return None if standing == Standing.STARTS else standing

        standing = await self._wait(begun, island, session)
        if standing == Standing.WAITS and has_trained:
            member.count(late=1, dropped=1)
            member.waits_since = None
            clock = number * self._every
            self._log({"event": "late", "island": island, "clock": clock, "version": self.version, "counts": False})
        return None if standing is None else standing == Standing.TRAINS

    async def ask(self, island: int, session: int) -> None:
        """Takes an island that needs the values of another one; the others do not wait for it."""
        self._members.find(island, session)
        self.meetings.ask(island)
        self._given.pop(island, None)
        await self._advance()

    async def values(self, island: int, session: int) -> tuple[int, list[Any]] | None:
        """Returns (clock, references) of what an island gets that has asked; None after a while, to be asked again.

        Raises:
            NobodyError: no island is there that has values.
        """

        def given() -> tuple[int, list[Any]] | None:
            if self.meetings.standings[island] == Standing.TRAINS:
                return self._given[island]
            if not self.meetings.training:
                self.meetings.join(island)
                raise NobodyError
            return None

        self._members.find(island, session)
        return await self._wait(given, island, session)

    async def give(self, island: int, session: int, refs: list[Any]) -> None:
        """Takes the values of an island for those that wait for them."""
        self._members.find(island, session)
        number = self.meetings.next[island]
        for each in self.meetings.give(island):
            self._given[each] = number * self._every, refs
            self.members[each].read_at = number
        await self._tell()

    async def come(self, island: int, session: int, come: Come) -> Gathered | None:
        """Returns a meeting, once all are there that send to an island; None after a while, to be asked again."""
        member = self._members.find(island, session)
        self._given.pop(island, None)
        meeting = self.meetings.come(island, come.number, come.sent)
        if self._came.get(island) != come.number:
            self._note_push(island, come, member)
            self._note_causes(island)
        await self._advance()
        if meeting is None:
            return Gathered([], [], 0)
        is_complete = await self._wait(lambda: meeting.is_complete(island) or None, island, session)
        return None if is_complete is None else self._gathered(meeting, island)

    def _gathered(self, meeting: Meeting, island: int) -> Gathered:
        senders = meeting.senders(island)
        neighbours = [Neighbour(sender, share, meeting.sent.get(sender)) for sender, share in senders]
        receivers = sum(each in meeting.present | meeting.has_sent for each in meeting.receivers(island))
        return Gathered(neighbours, meeting.shares(island), receivers)

    def _note_push(self, island: int, come: Come, member: Member) -> None:
        self._came[island], member.waits_since = come.number, self._now()
        member.count(tokens=come.tokens, pushes=1)
        member.totals |= {} if come.loss is None else {"loss": come.loss}
        self._log({
            "event": "push", "island": island, "clock": come.clock, "ahead": come.number - self.meetings.first,
            "staleness": max(0, self.version - come.number), "scale": 1.0, "tokens": come.tokens, "loss": come.loss,
            "is_finite": come.sent.is_finite, "version": self.version,
        })  # fmt: skip

    def _note_causes(self, cause: int) -> None:
        """Notes for whom islands have waited that wait no longer."""
        for meeting in self.meetings.meetings.values():
            for island in meeting.present & meeting.has_sent - self._cause.keys():
                if meeting.is_complete(island):
                    self._cause[island] = cause

    async def finish_meeting(self, island: int, session: int, number: int, read: tuple[int, int, list[int]]) -> bool:
        """Takes an island that has what it gets from a meeting. Returns whether others want its values.

        Args:
            island: its index.
            session: of its stay.
            number: of the meeting.
            read: bytes that it has sent and received, and the islands whose values it has.
        """
        member = self._members.find(island, session)
        is_wanted = self.meetings.finish(island, number)
        if member.waits_since is not None:  # else it has told that before
            sent, received, heard = read
            member.count(sent_bytes=sent, received_bytes=received, waited=self._now() - member.waits_since)
            member.waits_since, member.read_at = None, number + 1
            self.version = max(self.version, number + 1)
            self._log({
                "event": "update", "version": number + 1, "islands": sorted([island, *heard]), "readers": [island],
                "share": (1 + len(heard)) / max(len(self.members), 1), "step": (number + 1) * self._every,
                "cause": self._cause.pop(island, island),
            })  # fmt: skip
        await self._tell()
        return is_wanted

    async def is_read(self, island: int, session: int) -> bool | None:
        """Returns True once nobody has still to read what an island has sent; None after a while, to be asked again."""
        self._members.find(island, session)
        return await self._wait(lambda: None if self.meetings.is_needed(island) else True, island, session)

    async def finish(self) -> None:
        """Does nothing: the islands save their values themselves."""

    def _leave(self, island: int, why: str) -> None:
        if self._members.remove(island) is None:
            return
        self.meetings.leave(island)
        for found in (self._given, self._came, self._cause):
            found.pop(island, None)
        self._note_causes(NOBODY)
        self._log({"event": "leave", "island": island, "reason": why, "version": self.version})

    async def _advance(self) -> None:
        self.meetings.begin(self._starts_by is not None and self._now() >= self._starts_by)
        await self._tell()

    def status(self) -> dict[str, Any]:
        """Returns what `jaxtrain islands status` shows."""
        islands = self._members.status(self.version, lambda _, member: max(member.read_at * self._every, member.clock))
        return {"version": self.version, "clock": self.version * self._every, "problem": "", "islands": islands}
