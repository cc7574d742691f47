"""The coordinator of islands without a server: it decides who exchanges with whom, and passes on references.

It holds no parameters: values go from island to island.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtrain.config.sections.islands import IslandsConfig
from jaxtrain.islands.members import START_WAIT, BaseCoordinator, Member
from jaxtrain.islands.messages import Hello, NobodyError, Welcome
from jaxtrain.islands.peers.rounds import Entry, Place, RoundAttempt, Rounds, Standing


class Ready(NamedTuple):
    """An island at the end of its round.

    Attributes:
        place: the last round that counted for it.
        tokens: that it has trained on since then.
        is_finite: all its values are finite.
        clock: its steps.
        loss: of its last step, for the status.
        waited: seconds that it has waited for its exchange before this one, if it trains on during exchanges; None: it
            waits from now on.
    """

    place: Place
    tokens: float
    is_finite: bool
    clock: int
    loss: float | None
    waited: float | None = None


class Given(NamedTuple):
    """Values of the last round, from an island that has them.

    Attributes:
        place: that round.
        values: their shapes, and references to them.
    """

    place: Place
    values: tuple[Any, list[Any]]


class CountedRound(NamedTuple):
    """A round that counts.

    Attributes:
        place: the round.
        is_wanted: this island gives its values to others.
    """

    place: Place
    is_wanted: bool


class TryAgainError(Exception):
    """The attempt is over and does not count: an island that took part has left."""


class LeftBehindError(Exception):
    """The others went on without the island: it goes on from their values."""


class PeerCoordinator(BaseCoordinator):
    """State and decisions; every method is called in one thread.

    Args:
        config: section `islands`.
        every: steps of a round.
        log: takes a record of each event.
        now: clock, seconds.
        draw: returns the token of a round.
    """

    def __init__(
        self, config: IslandsConfig, every: int, log: Callable[[dict[str, Any]], None],
        now: Callable[[], float] = time.monotonic, draw: Callable[[], int] = lambda: random.randrange(1, 1 << 32),
    ) -> None:  # fmt: skip
        super().__init__(config, log, now)
        self._every = every
        self.rounds = Rounds(config.quorum, config.grace, config.count, draw)
        self._given: Given | None = None

    @property
    def version(self) -> int:
        """Number of rounds that counted."""
        return self.rounds.place.number

    async def join(self, hello: Hello, clock: int = 0) -> Welcome:
        """Lets an island take part. Raises RefusedError if it does not fit the others."""
        self._check_index(hello)
        member = self._admit(hello, self.version)
        if self._starts_by is None:
            self._starts_by = self._now() + START_WAIT
        self.rounds.join(hello.island)
        self._log({"event": "join", "island": hello.island, "clock": self._clock(), "version": self.version})
        given = [] if self.rounds.has_values else None
        return Welcome(member.session, self._clock(), [], given, self.version)

    async def start(self, island: int, session: int, place: Place) -> bool | None:
        """Returns whether an island goes on from its own values; None after a while, to be asked again."""
        self._members.find(island, session)
        if self.rounds.standings[island] in (Standing.STARTS, Standing.TRAINS):
            self.rounds.start(island, place)
            await self._advance()
        standing = await self._wait(lambda: self._begun(island), island, session)
        return None if standing is None else standing == Standing.TRAINS

    def _begun(self, island: int) -> Standing | None:
        standing = self.rounds.standings[island]
        return None if standing == Standing.STARTS else standing

    async def ask(self, island: int, session: int) -> None:
        """Takes an island that needs the values of another one; the others do not wait for it."""
        self._members.find(island, session)
        self.rounds.ask(island)
        await self._advance()

    async def values(self, island: int, session: int) -> Given | None:
        """Returns what an island gets that has asked, after the next round; None after a while, to be asked again.

        Raises:
            NobodyError: no island is there that has values.
        """

        def given() -> Given | None:
            if self.rounds.standings[island] == Standing.TRAINS:
                return self._given
            if not self.rounds.has_values:
                self.rounds.join(island)
                raise NobodyError
            return None

        self._members.find(island, session)
        return await self._wait(given, island, session)

    async def give(self, island: int, session: int, place: Place, values: tuple[Any, list[Any]]) -> None:
        """Takes the values of an island for those that wait for them: their shapes, and references to them."""
        self._members.find(island, session)
        if place == self.rounds.place:
            self._given = Given(place, values)
            for each in self.rounds.gave():
                self.members[each].read_at = self.version
            await self._tell()

    async def ready(self, island: int, session: int, ready: Ready) -> RoundAttempt | None:
        """Returns the exchange that an island takes part in; None after a while, to be asked again.

        Raises:
            LeftBehindError: the others went on without it.
        """
        member, rounds = self._members.find(island, session), self.rounds
        before = rounds.standings[island]
        entry = Entry(island, ready.tokens, ready.is_finite)
        if rounds.attempt is None or island not in rounds.attempt.islands:
            self._check_place(island, rounds.ready(entry, ready.place), ready.clock, member)
        if before == Standing.TRAINS:
            member.waits_since = self._now() if ready.waited is None else None
            member.count(tokens=ready.tokens, pushes=1, waited=ready.waited or 0.0)
            member.totals |= {} if ready.loss is None else {"loss": ready.loss}
            self._log({
                "event": "push", "island": island, "clock": ready.clock, "ahead": 0, "staleness": 0, "scale": 1.0,
                "tokens": ready.tokens, "loss": ready.loss, "is_finite": ready.is_finite, "version": self.version,
                **({} if ready.waited is None else {"waited": ready.waited}),
            })  # fmt: skip
        await self._advance()

        def attempt() -> RoundAttempt | None:
            found = rounds.attempt
            self._check_place(island, ready.place == rounds.place, ready.clock, member)
            return found if found is not None and island in found.islands else None

        found = await self._wait(attempt, island, session)
        return None if found is None else RoundAttempt(found.number, found.entries)  # without what others have sent

    def _check_place(self, island: int, is_here: bool, clock: int, member: Member) -> None:
        if not is_here:
            member.count(late=1, dropped=1)
            member.waits_since = None
            self._log({"event": "late", "island": island, "clock": clock, "version": self.version, "counts": False})
            raise LeftBehindError

    async def send(self, island: int, session: int, number: int, name: str, refs: list[Any]) -> None:
        """Takes what an island sends to each of an attempt. Raises TryAgainError if that is over."""
        self._members.find(island, session)
        self._attempt(number).mail[name, island] = refs
        await self._tell()

    async def collect(self, island: int, session: int, number: int, name: str) -> list[Any] | None:
        """Returns what all of an attempt have sent to an island; None after a while, to be asked again.

        Raises:
            TryAgainError: the attempt is over.
        """
        self._members.find(island, session)
        return await self._wait(lambda: self._attempt(number).collect(name, island), island, session)

    def _attempt(self, number: int) -> RoundAttempt:
        attempt = self.rounds.attempt
        if attempt is None or attempt.number != number:
            raise TryAgainError
        return attempt

    async def fail(self, island: int, session: int, number: int) -> None:
        """Ends an attempt in which an island could not read what another one has sent."""
        self._members.find(island, session)
        self.rounds.fail(number)
        await self._advance()

    async def done(self, island: int, session: int, number: int, nbytes: tuple[int, int]) -> CountedRound | None:
        """Takes an island that has the result of an attempt. Returns None after a while, to be asked again.

        Args:
            island: its index.
            session: of its stay.
            number: of the attempt.
            nbytes: that it has sent and received for it.

        Raises:
            TryAgainError: the attempt is over and does not count.
        """
        member, rounds = self._members.find(island, session), self.rounds
        if rounds.done(island, number):
            self._note_round()
            await self._tell()

        def counted() -> CountedRound | None:
            if rounds.last is not None and rounds.last.number == number:
                here = [each for each in rounds.last.islands if each in self.members]
                is_wanted = island == here[0] and Standing.WAITS in rounds.standings.values()
                return CountedRound(rounds.place, is_wanted)
            self._attempt(number)
            return None

        found = await self._wait(counted, island, session)
        if found is not None:
            member.count(sent_bytes=nbytes[0], received_bytes=nbytes[1])
            if member.waits_since is not None:
                member.count(waited=self._now() - member.waits_since)
            member.waits_since, member.read_at = None, self.version
        return found

    def _note_round(self) -> None:
        assert self.rounds.last is not None
        islands = self.rounds.last.islands
        readers = [island for island in islands if island in self.members]
        self._given = None
        self._log({
            "event": "update", "version": self.version, "islands": islands, "readers": readers,
            "share": len(islands) / max(len(self.members), 1), "step": self._clock(),
        })  # fmt: skip

    async def finish(self) -> None:
        """Does nothing: the islands save their values themselves."""

    def _leave(self, island: int, why: str) -> None:
        if self._members.remove(island) is None:
            return
        before = self.rounds.last
        self.rounds.leave(island)
        self._log({"event": "leave", "island": island, "reason": why, "version": self.version})
        if self.rounds.last is not before:
            self._note_round()

    async def _advance(self) -> None:
        self.rounds.begin(self._starts_by is not None and self._now() >= self._starts_by)
        self.rounds.next(self._now())
        await self._tell()

    def _clock(self) -> int:
        return self.rounds.place.number * self._every

    def status(self) -> dict[str, Any]:
        """Returns what `jaxtrain islands status` shows."""
        clock = self._clock()
        islands = self._members.status(self.version, lambda _, member: max(member.read_at * self._every, member.clock))
        return {"version": self.version, "clock": clock, "problem": "", "islands": islands}
