"""Rounds of islands that have no server: who takes part, and when what they computed counts. Plain logic.

The islands of a round wait for one another, exchange, and say when each of them has the result. The round counts, for
all, when every one that is still there has it: nobody goes on from what others do not have. If one leaves before, and
somebody lacks the result, the others try again without it, from what they had.

An island that is not where the others are waits for the values of one of them, which gives them after its next round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


class Place(NamedTuple):
    """The last round that counted for an island.

    Attributes:
        number: finished rounds.
        token: number drawn for that round; two islands of equal places have equal values. 0 before the first round.
    """

    number: int = 0
    token: int = 0


class Standing(Enum):
    """An island's part in the rounds."""

    STARTS = "starts"  # it says where it is, and waits until the others do
    WAITS = "waits"  # for the values of another one
    TRAINS = "trains"
    READY = "ready"  # to exchange


class Entry(NamedTuple):
    """An island of an attempt.

    Attributes:
        island: its index.
        tokens: that it has trained on since its last exchange.
        is_finite: all its values are finite.
    """

    island: int
    tokens: float
    is_finite: bool


@dataclass
class RoundAttempt:
    """An exchange of the islands that are ready.

    Attributes:
        number: of all attempts so far.
        entries: who takes part, ascending.
        done: those that have the result.
        mail: (name, sender) -> what it has sent, one value for each island of the attempt.
    """

    number: int
    entries: tuple[Entry, ...]
    done: set[int] = field(default_factory=set)
    mail: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    @property
    def islands(self) -> tuple[int, ...]:
        """Indices of those that take part."""
        return tuple(entry.island for entry in self.entries)

    def collect(self, name: str, island: int) -> list[Any] | None:
        """Returns what all have sent to an island under a name; None until all have."""
        if any((name, sender) not in self.mail for sender in self.islands):
            return None
        return [self.mail[name, sender][self.islands.index(island)] for sender in self.islands]


class Rounds:
    """Decides about the islands that are there.

    Args:
        quorum: islands that make a round; 0: all that are there.
        grace: seconds that it waits for the others then.
        islands: of the run, all of which the first round waits for if there is no quorum.
        draw: returns a number that no round has had, not 0.

    Attributes:
        place: the last round that counted.
        standings: of the islands that are there.
        attempt: the exchange that runs; None: there is none.
        last: the attempt that counted last.
    """

    def __init__(self, quorum: int, grace: float, islands: int, draw: Callable[[], int]) -> None:
        self._quorum, self._grace, self._draw = quorum, grace, draw
        self._first_needs = quorum or islands
        self.place = Place()
        self.standings: dict[int, Standing] = {}
        self.attempt: RoundAttempt | None = None
        self.last: RoundAttempt | None = None
        self._starting: dict[int, Place] = {}
        self._ready: dict[int, Entry] = {}
        self._attempts, self._has_begun = 0, False
        self._quorum_at: float | None = None

    @property
    def has_values(self) -> bool:
        """True if islands are there from which others may get the values of the last round."""
        return any(standing in (Standing.TRAINS, Standing.READY) for standing in self.standings.values())

    def join(self, island: int) -> None:
        """Adds an island, which then starts or asks for the values of the others."""
        self.standings[island] = Standing.STARTS

    def leave(self, island: int) -> None:
        """Removes an island."""
        self.standings.pop(island, None)
        self._starting.pop(island, None)
        self._ready.pop(island, None)
        attempt = self.attempt
        if attempt is None or island not in attempt.islands or self._counts(attempt):
            return
        self.attempt = None  # those that are left try again

    def start(self, island: int, place: Place) -> None:
        """Takes an island that says where it is."""
        if self.has_values:
            self._stand(island, place)
        else:
            self.standings[island], self._starting[island] = Standing.STARTS, place

    def begin(self, has_waited: bool) -> None:
        """Lets those that start begin, if all are there; where they differ, from the one that is furthest.

        Args:
            has_waited: they have waited long enough for others.
        """
        if self.has_values or not self._starting:
            return
        are_all_there = self._starting.keys() == self.standings.keys()
        if not has_waited and not (are_all_there and (self._has_begun or len(self._starting) >= self._first_needs)):
            return
        self._has_begun = True
        self.place = max(self._starting.values())
        for island, place in self._starting.items():
            self._stand(island, place)
        self._starting = {}

    def _stand(self, island: int, place: Place) -> None:
        self.standings[island] = Standing.TRAINS if place == self.place else Standing.WAITS

    def ask(self, island: int) -> None:
        """Takes an island that waits for the values of another one."""
        self.standings[island] = Standing.WAITS

    def gave(self) -> list[int]:
        """Lets those begin that waited for the values of another one, which are there. Returns them."""
        found = [island for island, standing in self.standings.items() if standing == Standing.WAITS]
        self.standings |= dict.fromkeys(found, Standing.TRAINS)
        return found

    def ready(self, entry: Entry, place: Place) -> bool:
        """Takes an island at the end of its round. Returns False if the others went on without it: then it waits."""
        if place != self.place or self.standings[entry.island] not in (Standing.TRAINS, Standing.READY):
            self.standings[entry.island] = Standing.WAITS
            return False
        self.standings[entry.island], self._ready[entry.island] = Standing.READY, entry
        return True

    def next(self, now: float) -> RoundAttempt | None:
        """Returns a new attempt, if one is due."""
        if self.attempt is not None or not self._ready:
            return None
        if 0 < self._quorum <= len(self._ready) and self._quorum_at is None:
            self._quorum_at = now
        is_over = self._quorum_at is not None and now >= self._quorum_at + self._grace
        if not is_over and Standing.TRAINS in self.standings.values():
            return None
        self._attempts += 1
        self.attempt = RoundAttempt(self._attempts, tuple(sorted(self._ready.values())))
        return self.attempt

    def fail(self, number: int) -> None:
        """Ends an attempt in which an island could not read what another one has sent."""
        if self.attempt is not None and self.attempt.number == number:
            self.attempt = None

    def done(self, island: int, number: int) -> bool:
        """Takes an island that has the result of an attempt. Returns True if the round now counts."""
        if self.attempt is None or self.attempt.number != number:
            return False
        self.attempt.done.add(island)
        return self._counts(self.attempt)

    def _counts(self, attempt: RoundAttempt) -> bool:
        """Ends the round if all of the attempt that are there have the result, and somebody is."""
        here = [island for island in attempt.islands if island in self.standings]
        if not here or not attempt.done.issuperset(here):
            return False
        self.place = Place(self.place.number + 1, self._draw())
        self.standings |= dict.fromkeys(here, Standing.TRAINS)
        late = self._ready.keys() - set(attempt.islands)  # they came after the attempt had begun
        self.standings |= dict.fromkeys(late, Standing.WAITS)
        self._ready, self._quorum_at = {}, None
        self.attempt, self.last = None, attempt
        return True
