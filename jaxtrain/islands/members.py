"""The islands that take part and those that have left, and what all coordinators do about them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxtrain.config.sections.islands import IslandsConfig
from jaxtrain.islands.messages import Hello, RefusedError, SessionOverError

T = TypeVar("T")
SILENCE = 2.0  # heartbeats without a sign of life after which an island has left
LONGEST_WAIT = 2.0  # seconds of one call that waits
START_WAIT = 120.0  # seconds after the first island is there that the first update waits for the others


@dataclass
class Member:
    """An island that takes part.

    Attributes:
        session: number of its stay.
        seen: time of its last message.
        joined: time at which it joined.
        clock: its steps when it left.
        read_at: version of its last read.
        released: it may read.
        waits_since: time since which it waits to read; None: it computes.
        totals: for the status: tokens, bytes both ways, steps, seconds waited, loss, late and dropped pushes.
    """

    session: int
    seen: float
    joined: float = 0.0
    clock: int = 0
    read_at: int = 0
    released: bool = False
    waits_since: float | None = None
    totals: dict[str, float] = field(default_factory=dict)

    def count(self, **values: float) -> None:
        """Adds to the totals."""
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + value


class Members:
    """Islands by their index.

    Args:
        heartbeat: seconds between signs of life.
        now: clock, seconds.

    Attributes:
        here: those that take part.
    """

    def __init__(self, heartbeat: float, now: Callable[[], float]) -> None:
        self.here: dict[int, Member] = {}
        self._past: dict[int, Member] = {}
        self._heartbeat, self._now, self._sessions = heartbeat, now, 0

    def admit(self, island: int, version: int) -> Member:
        """Begins a stay of an island, which goes on with the totals of those before.

        Args:
            island: its index; it is not there.
            version: of what it reads.
        """
        self._sessions += 1
        member = self._past.pop(island, None) or Member(0, 0.0)
        member.session, member.seen, member.read_at = self._sessions, self._now(), version
        member.joined, member.released, member.waits_since = self._now(), False, None
        self.here[island] = member
        return member

    def remove(self, island: int) -> Member | None:
        """Ends the stay of an island. Returns it if it was there."""
        if (member := self.here.pop(island, None)) is not None:
            self._past[island] = member
            member.count(seconds=self._now() - member.joined)
        return member

    def find(self, island: int, session: int) -> Member:
        """Returns an island that gives a sign of life. Raises SessionOverError if that stay is over."""
        member = self.here.get(island)
        if member is None or member.session != session:
            raise SessionOverError(f"island {island} has left; expected that it joins again")
        member.seen = self._now()
        return member

    def silent(self, stood_still: float = 0.0) -> list[int]:
        """Returns the islands that have given no sign of life for too long.

        Args:
            stood_still: seconds since the last call in which this process did not run: it has read no signs of life.
        """
        now = self._now()
        for member in self.here.values():
            member.seen = min(now, member.seen + stood_still)
        return [island for island, member in self.here.items() if member.seen < now - SILENCE * self._heartbeat]

    def status(self, version: int, clock_of: Callable[[int, Member], int]) -> dict[str, Any]:
        """Returns for each island what `jaxtrain islands status` shows.

        Args:
            version: updates so far.
            clock_of: (island, member) -> its steps.
        """
        everyone, now = sorted((self._past | self.here).items()), self._now()
        found = {}
        for island, member in everyone:
            is_there = island in self.here
            found[str(island)] = {
                **member.totals, "clock": clock_of(island, member), "is_there": is_there,
                "staleness": version - member.read_at, "waits": member.waits_since is not None,
                "seen": now - member.seen,
                "seconds": member.totals.get("seconds", 0.0) + (now - member.joined if is_there else 0.0),
            }  # fmt: skip
        return found


class BaseCoordinator(ABC):
    """Islands come, give signs of life, wait, and go. Every method is called in one thread.

    Args:
        config: section `islands`.
        log: takes a record of each event.
        now: clock, seconds.
    """

    def __init__(
        self, config: IslandsConfig, log: Callable[[dict[str, Any]], None], now: Callable[[], float]
    ) -> None:  # fmt: skip
        self.config, self._members = config, Members(config.heartbeat, now)
        self._log, self._now = log, now
        self._changed = asyncio.Condition()
        self._first: Hello | None = None
        self._starts_by: float | None = None  # those that start wait no longer; None: nobody is there

    @property
    def members(self) -> dict[int, Member]:
        """Islands that take part."""
        return self._members.here

    def _check_index(self, hello: Hello) -> None:
        """Raises RefusedError unless the run has an island of this index."""
        if not 0 <= hello.island < self.config.count:
            raise RefusedError(f"island {hello.island}: expected a number below islands.count={self.config.count}")

    def _admit(self, hello: Hello, version: int) -> Member:
        """Lets an island begin a stay. Raises RefusedError if it does not fit the first one."""
        self._first = self._first or hello
        hello.check(self._first)
        self._leave(hello.island, "joins again")
        return self._members.admit(hello.island, version)

    async def heartbeat(self, island: int, session: int) -> None:
        """Takes a sign of life. Raises SessionOverError if the island has to join anew."""
        self._members.find(island, session)

    async def leave(self, island: int, session: int) -> None:
        """Ends the stay of an island; the others go on without it."""
        self._members.find(island, session)
        self._leave(island, "leaves")
        await self._advance()

    async def check_silence(self, stood_still: float = 0.0) -> None:
        """Lets those go that have given no sign of life, and does what time makes due.

        Args:
            stood_still: seconds since the last check in which this process did not run: it has read no signs of life.
        """
        for island in self._members.silent(stood_still):
            self._leave(island, "is silent")
        await self._advance()

    @abstractmethod
    def _leave(self, island: int, why: str) -> None:
        """Ends the stay of an island, if it is there."""

    @abstractmethod
    async def _advance(self) -> None:
        """Does what is due, and tells those that wait."""

    async def _tell(self) -> None:
        """Lets those look again that wait."""
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, found: Callable[[], T | None], island: int, session: int) -> T | None:
        """Returns a value once there is one; None after `LONGEST_WAIT`, to be asked again."""
        deadline = self._now() + LONGEST_WAIT
        while (value := found()) is None:
            remaining = deadline - self._now()
            if remaining <= 0:
                return None
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), remaining)
                except TimeoutError:
                    return None
            self._members.find(island, session)
        return value
