"""An island among others without a server: all of a round average what they send, each its part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.islands.blocks import EncodedArray
from jaxtrain.islands.client import Arrays, Arrived, Door, Refs, ServerlessClient, read_pieces
from jaxtrain.islands.messages import Hello, LostValueError, SessionOverError
from jaxtrain.islands.partition import STACKED, Part, Parts, Spec, partition
from jaxtrain.islands.peers.coordinator import CountedRound, LeftBehindError, Ready, TryAgainError
from jaxtrain.islands.peers.rounded_mean import LOST, RoundedMean, rounded_mean
from jaxtrain.islands.peers.rounds import Place, RoundAttempt
from jaxtrain.islands.pieces import Pieces, assemble, decoded, merged, piece_bytes, pieces_of, whole_pieces
from jaxtrain.islands.server.rules import Header, weighted_mean
from jaxtrain.islands.trees import Flat, Path


class SwappedMean(NamedTuple):
    """A mean that islands have exchanged.

    Attributes:
        values: (part, mean) of each island.
        sent: bytes.
        received: bytes.
        lost: see `Arrived`.
    """

    values: list[tuple[Parts, Mapping[Path, np.ndarray]]]
    sent: int
    received: int
    lost: tuple[Parts, Flat]


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
        self, arrays: Arrays, initial: Callable[[], Arrays], clock: int, tokens: float, loss: float | None = None,
        is_finite: bool = True,
    ) -> Arrived:  # fmt: skip
        """Averages with the others, as often as islands leave in the middle of it; see `IslandClient`."""
        return self.average(arrays, clock, tokens, loss, is_finite)

    def average(
        self, arrays: Arrays, clock: int, tokens: float, loss: float | None = None, is_finite: bool = True,
        waited: float | None = None,
    ) -> Arrived:  # fmt: skip
        """Averages as `exchange` does, for an island that waits meanwhile, or trains on.

        Args:
            arrays: the values.
            clock: steps of the island at the end of the round.
            tokens: that the values were trained on.
            loss: of its last step.
            is_finite: all values are; else they are left out.
            waited: seconds that it has waited for the exchange before this one; None: it waits meanwhile.
        """
        while True:
            try:
                return self._averaged(arrays, Ready(self._place, tokens, is_finite, clock, loss, waited))
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
            self._call("give", self._place, (specs, self._door.put(pieces_of(values, _whole(values)))))

    def _values(self, clock: int) -> Arrived:
        """Returns the values of another island, once it has done as many steps."""
        while True:
            self._call("ask")
            place, (specs, refs) = self._asked("values")
            if place.number * self._every < clock:
                continue
            try:
                values = assemble(merged(self._door.get(refs)), specs)
            except LostValueError:
                continue
            self._place = place
            return Arrived(
                [(_whole(values), values)], place.number * self._every, 0, {}, _sizes(values), place=place
            )  # fmt: skip

    def _averaged(self, arrays: Arrays, ready: Ready) -> Arrived:
        attempt: RoundAttempt = self._asked("ready", ready)
        try:
            mean = self._mean(arrays, attempt)
        except LostValueError:
            self._call("fail", attempt.number)
            raise TryAgainError from None
        counted: CountedRound = self._asked("done", attempt.number, (mean.sent, mean.received))
        self._place = counted.place
        finite = sum(entry.is_finite for entry in attempt.entries)
        metrics = {"pushing": float(len(attempt.entries)), "left_out": float(len(attempt.entries) - finite)}
        return Arrived(
            mean.values if finite else [], ready.clock, mean.sent, metrics, mean.received, place=counted.place,
            is_mean=True, is_wanted=counted.is_wanted, lost=mean.lost,
        )  # fmt: skip

    def _mean(self, arrays: Arrays, attempt: RoundAttempt) -> SwappedMean:
        """Returns the mean of the islands of an attempt. All of them call this."""
        number, count, own = attempt.number, len(attempt.entries), attempt.islands.index(self.index)
        whole = {path: Spec(tuple(x.shape), x.dtype) for path, x in arrays.items()}
        parts = self._parts(tuple(whole.items()), count)
        specs = [{path: part.spec(whole[path]) for path, part in each.items()} for each in parts]
        sizes = [sum(_size(arrays[path], spec) for path, spec in each.items()) for each in specs]
        arrived = self._swapped(number, "values", [self._door.put(pieces_of(arrays, part)) for part in parts], True)
        weights, mean = _weights(attempt), RoundedMean({}, {})
        if self._door.is_first:
            flats = [assemble(decoded(pieces), specs[own]) for pieces in arrived]
            mean = rounded_mean(weighted_mean(flats, weights), arrays if count > 1 else {})
        messages = [self._door.put(whole_pieces(mean.message))] * count
        if any(isinstance(x, EncodedArray) for x in arrays.values()):
            messages[own] = self._door.put(whole_pieces({**mean.message, **_named_lost(mean.lost)}))
        found = self._swapped(number, "mean", messages)
        means = [assemble(decoded(pieces), spec) for pieces, spec in zip(found, specs)]
        nbytes = [piece_bytes({path: pieces[path] for path in spec}) for pieces, spec in zip(found, specs)]
        others, share = count - 1, np.float32(weights[own] or 1 / count)
        lost = {path: spec for path, spec in _named_lost(specs[own]).items() if path in found[own]}
        return SwappedMean(
            list(zip(parts, means)), sum(sizes) - sizes[own] + others * nbytes[own],
            others * sizes[own] + sum(nbytes) - nbytes[own],
            (parts[own], {path[1:]: x / share for path, x in assemble(found[own], lost).items()}),
        )  # fmt: skip

    def _swapped(self, number: int, name: str, refs: list[Refs], by_first: bool = False) -> list[Pieces]:
        """Returns what all islands of an attempt have sent to this one, which has sent them references.

        Args:
            number: of the attempt.
            name: of what is sent.
            refs: for each island.
            by_first: the first process of the island alone reads it.
        """
        self._call("send", number, name, refs)
        return read_pieces(self._door, self._asked("collect", number, name), by_first)


def _named_lost(values: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns what a mean has lost as it is named in the message of an island to its own processes."""
    return {(LOST, *path): value for path, value in values.items()}


def _size(array: Any, part: Spec) -> int:
    """Returns the bytes of some rows of an array, as it travels."""
    return array.nbytes * prod(part.shape) // max(prod(array.shape), 1)


def _in_rows(specs: Mapping[Path, Spec]) -> dict[Path, Spec]:
    """Returns tensors that may be cut between any two rows, for what is computed value by value."""
    return {path: spec._replace(names=(STACKED,)) if spec.shape else spec for path, spec in specs.items()}


def _whole(paths: Iterable[Path]) -> Parts:
    return dict.fromkeys(paths, Part())


def _weights(attempt: RoundAttempt) -> Any:
    """Returns the shares of the islands in the mean, by their tokens."""
    entries = attempt.entries
    tokens, are_finite = tuple(entry.tokens for entry in entries), tuple(entry.is_finite for entry in entries)
    return Header(attempt.islands, tokens, (1.0,) * len(entries), 0, 1.0, are_finite).weights()


def _sizes(values: Flat) -> int:
    return sum(value.nbytes for value in values.values())
