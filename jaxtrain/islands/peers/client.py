"""An island among others without a server: all of a round average what they send, each its part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, cast

import jax

from jaxtrain.islands.client import Arrays, Arrived, Door, ServerlessClient
from jaxtrain.islands.messages import Hello, LostValueError, SessionOverError
from jaxtrain.islands.partition import STACKED, Part, Parts, Spec, partition
from jaxtrain.islands.peers.coordinator import CountedRound, LeftBehindError, Ready, TryAgainError
from jaxtrain.islands.peers.rounds import Place, RoundAttempt
from jaxtrain.islands.pieces import TensorPiece, assemble, decoded, pieces_of
from jaxtrain.islands.server.rules import Header, is_finite, weighted_mean
from jaxtrain.islands.trees import Flat, Path


class PeerClient(ServerlessClient):
    """Averages with the other islands of a round.

    Every island sums a part of the values, in the order of the islands, so that all get the same bits. Of n islands
    each sends and receives 2 (n - 1) / n of the values, as in a ring, in two steps.

    Args:
        door: to the coordinator.
        hello: says who the island is, and what it trains.
        every: steps of a round.
    """

    def __init__(self, door: Door, hello: Hello, every: int) -> None:
        super().__init__(door, hello, every)
        self._place = Place()
        self._parts = cache(lambda specs, count: partition(_in_rows(dict(specs)), count))

    def stand_at(self, place: tuple[int, int]) -> None:
        """Takes the last round that counts for the values of the island, which may have gone back to older ones."""
        self._place = Place(*place)

    def start(self, clock: int, initial: Callable[[], Arrays], place: tuple[int, int]) -> Arrived:
        """Returns no values if the island begins where the others do, else those of another one, once it is as far."""
        self.stand_at(place)
        return self._stand(clock, self._place) or Arrived([], clock, 0, {}, place=self._place)

    def exchange(
        self, arrays: Arrays, initial: Callable[[], Arrays], clock: int, tokens: float, loss: float | None = None
    ) -> Arrived:
        """Averages with the others, as often as islands leave in the middle of it; see `IslandClient`."""
        return self.average(cast(Flat, arrays), clock, tokens, loss)  # none is in few bits

    def average(
        self, arrays: Flat, clock: int, tokens: float, loss: float | None = None, waited: float | None = None
    ) -> Arrived:
        """Averages as `exchange` does, for an island that waits meanwhile, or trains on.

        Args:
            arrays: values; those that are not finite are left out.
            clock: steps of the island at the end of the round.
            tokens: that the values were trained on.
            loss: of its last step.
            waited: seconds that it has waited for the exchange before this one; None: it waits meanwhile.
        """
        own = [piece.values for pieces in pieces_of(arrays, _whole(arrays)).values() for piece in pieces]
        is_whole = is_finite(own)
        while True:
            try:
                return self._averaged(arrays, Ready(self._place, tokens, is_whole, clock, loss, waited))
            except TryAgainError:
                continue
            except LeftBehindError:
                pass
            except SessionOverError:
                self._join_again(clock)
            if (found := self._stand(clock, self._place)) is not None:
                return found._replace(counts=False)

    def give(self, values: Mapping[Path, jax.Array]) -> None:
        """Gives values to the islands that wait for them, after a round that counts."""
        specs = {path: Spec(value.shape, value.dtype) for path, value in values.items()}
        with suppress(SessionOverError):  # else they get them from another island
            self._call("give", self._place, [self._door.put((specs, pieces_of(values, _whole(values))))])

    def _values(self, clock: int) -> Arrived:
        """Returns the values of another island, once it has done as many steps."""
        while True:
            self._call("ask")
            place, refs = self._asked("values")
            if place.number * self._every < clock:
                continue
            try:
                ((specs, pieces),) = self._door.get(refs)
            except LostValueError:
                continue
            self._place, values = place, assemble(pieces, specs)
            return Arrived(
                [(_whole(values), values)], place.number * self._every, 0, {}, _sizes(values), place=place
            )  # fmt: skip

    def _averaged(self, arrays: Flat, ready: Ready) -> Arrived:
        attempt: RoundAttempt = self._asked("ready", ready)
        try:
            values, sent, received = self._mean(arrays, attempt)
        except LostValueError:
            self._call("fail", attempt.number)
            raise TryAgainError from None
        counted: CountedRound = self._asked("done", attempt.number, (sent, received))
        self._place = counted.place
        finite = sum(entry.is_finite for entry in attempt.entries)
        metrics = {"pushing": float(len(attempt.entries)), "left_out": float(len(attempt.entries) - finite)}
        return Arrived(
            values if finite else [], ready.clock, sent, metrics, received, place=counted.place, is_mean=True,
            is_wanted=counted.is_wanted,
        )  # fmt: skip

    def _mean(self, arrays: Flat, attempt: RoundAttempt) -> tuple[list[Any], int, int]:
        """Returns (part, mean) of each island of an attempt, and the bytes sent and received."""
        islands, number = attempt.islands, attempt.number
        whole = {path: Spec(tuple(x.shape), x.dtype) for path, x in arrays.items()}
        own, parts = islands.index(self.index), self._parts(tuple(whole.items()), len(attempt.entries))
        messages = [pieces_of(arrays, part) for part in parts]
        sent = sum(_nbytes(message) for i, message in enumerate(messages) if i != own)
        arrived = self._swapped(number, "values", [self._door.put(message) for message in messages])
        received = sum(_nbytes(pieces) for i, pieces in enumerate(arrived) if i != own)
        specs = {path: part.spec(whole[path]) for path, part in parts[own].items()}
        header = Header(
            islands, tuple(entry.tokens for entry in attempt.entries), (1.0,) * len(islands), 0, 1.0,
            tuple(entry.is_finite for entry in attempt.entries),
        )  # fmt: skip
        mean = weighted_mean([assemble(decoded(pieces), specs) for pieces in arrived], header.weights())
        means = self._swapped(number, "mean", [self._door.put(mean)] * len(islands))
        sent += (len(islands) - 1) * _sizes(mean)
        received += sum(_sizes(each) for i, each in enumerate(means) if i != own)
        return list(zip(parts, means)), sent, received

    def _swapped(self, number: int, name: str, refs: list[Any]) -> list[Any]:
        """Returns what all islands of an attempt have sent to this one, which has sent them references."""
        self._call("send", number, name, refs)
        return self._door.get(self._asked("collect", number, name))


def _in_rows(specs: Mapping[Path, Spec]) -> dict[Path, Spec]:
    """Returns tensors that may be cut between any two rows, for what is computed value by value."""
    return {path: spec._replace(names=(STACKED,)) if spec.shape else spec for path, spec in specs.items()}


def _whole(paths: Iterable[Path]) -> Parts:
    return dict.fromkeys(paths, Part())


def _nbytes(pieces: Mapping[Path, Sequence[TensorPiece]]) -> int:
    return sum(piece.values.nbytes for found in pieces.values() for piece in found)


def _sizes(values: Flat) -> int:
    return sum(value.nbytes for value in values.values())
