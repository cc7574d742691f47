"""Rules by which pushes become an update, and islands may read after it. Plain logic, without clocks.

`StalePolicy` is the rule of `sync.clocks` for islands whose clocks are real: an island reads, computes an iteration and
pushes it; it may begin iteration c if c is at most `bound` ahead of the number that the slowest island has completed.
Pushes that no read separates are one update. `RoundPolicy` waits for all islands that are there, or for a quorum;
`PartialRoundPolicy` takes what there is, however old.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from jaxtrain.config.sections.islands import IslandsConfig

PushId = tuple[int, int]  # island, number of the push: in this order they are summed


class Due(NamedTuple):
    """The next update.

    Attributes:
        pushes: those that are one update; none: only reads are due.
        readers: islands that may read after it.
    """

    pushes: list[PushId]
    readers: list[int]


class UpdatePolicy(ABC):
    """Decides about the islands that are there.

    Attributes:
        completed: clock of each island that is there: the number of steps that it has pushed.
        merges_stale: pushes count that were computed from earlier parameters than the newest ones.
        first_needs: islands that must be there before the first update.
    """

    merges_stale: bool
    first_needs: int

    def __init__(self) -> None:
        self.completed: dict[int, int] = {}
        self._pushed: set[PushId] = set()  # since the last update
        self._waiting: set[int] = set()  # for a read

    def join(self, island: int, clock: int) -> None:
        """Adds an island that has read the parameters and begins step `clock`."""
        self.completed[island] = clock

    def newcomer(self, newest: int) -> int:
        """Returns the clock at which an island begins that joins now: that of the slowest.

        Args:
            newest: clock of the newest update.
        """
        return min(self.completed.values(), default=newest)

    def leave(self, island: int) -> None:
        """Removes an island; the others do not wait for it. Its last push still counts: it was acknowledged."""
        self.completed.pop(island, None)
        self._waiting.discard(island)

    def push(self, island: int, number: int, clock: int) -> None:
        """Takes the push of an island after `clock` steps. It waits for its read."""
        self.completed[island] = clock
        self._pushed.add((island, number))

    def wait(self, island: int, clock: int) -> None:
        """Lets an island that has pushed nothing wait for its read after `clock` steps."""
        self.completed[island] = clock
        self._waiting.add(island)

    @abstractmethod
    def next(self, now: float) -> Due | None:
        """Returns the next update and its readers, who then compute; None if nothing is due."""


class StalePolicy(UpdatePolicy):
    """`asp` without a bound, `ssp`, and `bsp` with a bound of 0."""

    merges_stale = True

    def __init__(self, bound: int | None, islands: int) -> None:
        super().__init__()
        self._bound, self.first_needs = bound, 1 if bound is None else islands

    def push(self, island: int, number: int, clock: int) -> None:
        """Takes the push of an island, which waits until it may begin iteration `clock`."""
        super().push(island, number, clock)
        self._waiting.add(island)

    def next(self, now: float) -> Due | None:
        """Returns all pushes, if an island may read."""
        slowest = min(self.completed.values(), default=0)
        readers = [w for w in self._waiting if self._bound is None or self.completed[w] <= slowest + self._bound]
        if not readers and not (self._pushed and not self.completed):  # the last one has left its push
            return None
        due = Due(sorted(self._pushed), sorted(readers))
        self._waiting -= set(readers)
        self._pushed = set()
        return due


class RoundPolicy(UpdatePolicy):
    """Rounds of `local_sgd` and `diloco`: an update has a push of each island that is there, or of a quorum.

    Args:
        quorum: islands that complete a round; 0: all that are there.
        grace: seconds that it waits for the others then.
        islands: of the run.
    """

    merges_stale = False

    def __init__(self, quorum: int, grace: float, islands: int) -> None:
        super().__init__()
        self._quorum, self._grace, self.first_needs = quorum, grace, quorum or islands
        self._quorum_at: float | None = None

    def newcomer(self, newest: int) -> int:
        """Returns the clock at which the round has begun that waits for the newcomer, too."""
        pushed = {island for island, _ in self._pushed}  # they are at its end
        return min((clock for island, clock in self.completed.items() if island not in pushed), default=newest)

    def next(self, now: float) -> Due | None:
        """Returns those that have pushed nothing, at once; else the pushes of a round that is complete."""
        if self._waiting:
            readers, self._waiting = sorted(self._waiting), set()
            return Due([], readers)
        islands = {island for island, _ in self._pushed}
        if not islands:
            return None
        if 0 < self._quorum <= len(islands) and self._quorum_at is None:
            self._quorum_at = now
        is_over = self._quorum_at is not None and now >= self._quorum_at + self._grace
        if not is_over and not islands >= self.completed.keys():
            return None
        due = Due(sorted(self._pushed), sorted(islands & self.completed.keys()))
        self._pushed, self._quorum_at = set(), None
        return due


class PartialRoundPolicy(RoundPolicy):
    """Updates of `async_diloco`: of a quorum, and of those that come within its grace; the others keep training.

    Args:
        quorum: islands that make an update; 0: one.
        grace: seconds that it waits for others then.
    """

    merges_stale = True

    def __init__(self, quorum: int, grace: float) -> None:
        super().__init__(quorum or 1, grace, 1)

    def newcomer(self, newest: int) -> int:
        """Returns the clock of the slowest: no round waits for the newcomer."""
        return UpdatePolicy.newcomer(self, newest)


def make_policy(strategy: str, bound: int, islands: IslandsConfig) -> UpdatePolicy:
    """Returns the policy of a strategy.

    Args:
        strategy: one of islands.
        bound: of `ssp`.
        islands: section `islands`.
    """
    bounds = {"bsp": 0, "ssp": bound, "asp": None}
    if strategy in bounds:
        return StalePolicy(bounds[strategy], islands.count)
    if strategy == "async_diloco":
        return PartialRoundPolicy(islands.quorum, islands.grace)
    return RoundPolicy(islands.quorum, islands.grace, islands.count)
