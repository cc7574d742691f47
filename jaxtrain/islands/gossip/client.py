"""An island that gossips: it sends its values to some others, and reads those of the islands that send to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import jax

from jaxtrain.errors import TrainingError
from jaxtrain.islands.client import Arrays, Arrived, Door, ServerlessClient
from jaxtrain.islands.gossip.coordinator import Come, Gathered
from jaxtrain.islands.gossip.meetings import Neighbour, Sent
from jaxtrain.islands.messages import Hello, LostValueError, SessionOverError
from jaxtrain.islands.partition import Part, Parts
from jaxtrain.islands.pieces import assemble, merged, pieces_of
from jaxtrain.islands.trees import Flat, Path


class GossipClient(ServerlessClient):
    """Meets some of the other islands. Every island puts one message into the store, which its receivers read.

    Args:
        door: to the coordinator.
        hello: says who the island is, and what it trains.
        every: steps from one meeting to the next.
    """

    def __init__(self, door: Door, hello: Hello, every: int) -> None:
        super().__init__(door, hello, every)
        self._has_trained = False
        self._whole: Parts = dict.fromkeys(hello.specs, Part())

    def start(self, clock: int, initial: Callable[[], Arrays], place: tuple[int, int]) -> Arrived:
        """Returns no values if the island goes on from its own, else those of another one, after its next meeting."""
        found = self._stand(clock, clock // self._every, self._has_trained)
        self._has_trained = True
        return found or Arrived([], clock, 0, {})

    def exchange(
        self, arrays: Arrays, initial: Callable[[], Arrays], clock: int, tokens: float, loss: float | None = None,
        is_finite: bool = True,
    ) -> Arrived:  # fmt: skip
        """Meets the others; see `IslandClient`.

        Args:
            arrays: all values of the island.
            initial: not called.
            clock: steps of the island.
            tokens: that it has trained on since the last exchange.
            loss: of its last step.
            is_finite: all values are.
        """
        message = pieces_of(arrays, self._whole) if is_finite else {}  # which nobody reads
        number = clock // self._every - 1
        nbytes = sum(x.nbytes for x in arrays.values()) if is_finite else 0
        come = Come(number, clock, tokens, loss, Sent(self._door.put(message), is_finite))
        while True:
            try:
                return self._met(self._asked("come", come), number, clock, nbytes)
            except SessionOverError:
                self._join_again(clock)
            if (found := self._stand(clock, number, self._has_trained)) is not None:
                return found._replace(counts=False)

    def give(self, values: Mapping[Path, jax.Array]) -> None:
        """Gives values to the islands that wait for them, after a meeting."""
        with suppress(SessionOverError):  # else they get them from another island
            self._call("give", self._door.put(pieces_of(values, self._whole)))

    def linger(self) -> None:
        """Waits until those that are there have read what the island has sent, which ends with its process."""
        with suppress(SessionOverError, TrainingError):  # the others have noticed before
            self._asked("is_read")

    def _met(self, gathered: Gathered, number: int, clock: int, nbytes: int) -> Arrived:
        heard, values, weights = [], [], [1 - sum(gathered.shares)]
        for neighbour in gathered.neighbours:
            if (found := self._read(neighbour)) is not None:
                heard.append(neighbour.island)
                values.append((self._whole, found))
                weights.append(neighbour.share)
        sent, received = nbytes * gathered.receivers, sum(_size(each) for _, each in values)
        is_wanted = self._call("finish_meeting", number, (sent, received, heard))
        missing = len(gathered.neighbours) - len(heard)
        metrics = {"pushing": float(len(heard)), "left_out": float(missing)}
        return Arrived(values, clock, sent, metrics, received, is_wanted=is_wanted, weights=tuple(weights))

    def _read(self, neighbour: Neighbour) -> Flat | None:
        """Returns the values of a neighbour, if they are there and finite."""
        if neighbour.sent is None or not neighbour.sent.is_finite:
            return None
        try:
            pieces = merged(self._door.get(neighbour.sent.refs))
        except LostValueError:
            return None
        return assemble(pieces, self._hello.specs)

    def _values(self, clock: int) -> Arrived:
        """Returns the values of another island, which are of its next meeting: it is as far."""
        while True:
            self._call("ask")
            clock, refs = self._asked("values")
            with suppress(LostValueError):
                values = assemble(merged(self._door.get(refs)), self._hello.specs)
                return Arrived([(self._whole, values)], clock, 0, {}, _size(values))


def _size(values: Flat) -> int:
    return sum(value.nbytes for value in values.values())
