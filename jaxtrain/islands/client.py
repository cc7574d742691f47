"""An island's side: it joins, exchanges, and joins anew when the others went on without it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxtrain.errors import TrainingError
from jaxtrain.islands.blocks import EncodedArray
from jaxtrain.islands.messages import Hello, NobodyError, Pulled, Push, SessionOverError, Welcome
from jaxtrain.islands.partition import Parts
from jaxtrain.islands.pieces import Pieces, merged, pieces_of
from jaxtrain.islands.server.public_values import with_message
from jaxtrain.islands.trees import Flat, Path

Arrays = Mapping[Path, jax.Array | EncodedArray]
Refs = list[Any]  # references to pieces of values, one of each process of an island


class Door(Protocol):
    """Calls of the coordinator, and values on their way. Raises LostServerError if they are gone for good.

    Attributes:
        is_first: this is the first process of the island, or the only one.
    """

    is_first: bool

    def call(self, method: str, *args: Any) -> Any:
        """Returns what a method of the coordinator returns, or raises what it raises."""
        ...

    def put(self, value: Any) -> Refs:
        """Returns references to pieces of values that others can read."""
        ...

    def get(self, refs: list[Any], by_first: bool = False) -> list[Any]:
        """Returns the values of references; with `by_first` none in other processes than the first one."""
        ...


def read_pieces(door: Door, sent: list[Refs], by_first: bool = False) -> list[Pieces]:
    """Returns what references of several messages are to, with the pieces of all processes of their islands.

    Args:
        door: of this island.
        sent: references of each message.
        by_first: only the first process of this island needs them; the others get nothing.
    """
    found = iter(door.get([ref for refs in sent for ref in refs], by_first))
    if by_first and not door.is_first:
        return []
    return [merged([next(found) for _ in refs]) for refs in sent]


class Arrived(NamedTuple):
    """Values that an island reads.

    Attributes:
        values: (what it holds, its values) of each server.
        clock: steps after which the island goes on; not its own if it was left behind.
        nbytes: that it has sent.
        metrics: of the update.
        received: bytes that it has read.
        counts: what it has pushed is part of an update.
        place: the last round that counts for the island, if there is no server.
        is_mean: the values are the mean of the islands of a round, from which each takes the step of the strategy; none
            if no island had finite ones.
        is_wanted: others wait for the values that the island has after that.
        weights: shares in gossip: that the island keeps of its own, and that each of `values` has of its sender's.
        lost: (what it is of, values): rows that the mean which this island has rounded has lost, over its share in it.
    """

    values: list[tuple[Parts, Mapping[Path, np.ndarray]]]
    clock: int
    nbytes: int
    metrics: dict[str, float]
    received: int = 0
    counts: bool = True
    place: tuple[int, int] = (0, 0)
    is_mean: bool = False
    is_wanted: bool = False
    weights: tuple[float, ...] = ()
    lost: tuple[Parts, Flat] = ({}, {})


class IslandClient(ABC):
    """Speaks for an island. `beat` may be called from another thread.

    Args:
        door: to the coordinator.
        hello: says who the island is, and what it trains.

    Attributes:
        waited: seconds, in all.
    """

    def __init__(self, door: Door, hello: Hello) -> None:
        self._door, self._hello = door, hello
        self._welcome: Welcome | None = None
        self._lock = threading.Lock()
        self._has_left = False
        self.waited = 0.0

    @property
    def index(self) -> int:
        """Index of the island."""
        return self._hello.island

    def join(self, clock: int = 0) -> int:
        """Joins the others. Returns the steps after which they are, 0 at the start of the run.

        Args:
            clock: steps of the island, for servers that have lost all.

        Raises:
            RefusedError: the island does not fit the others.
        """
        welcome = self._door.call("join", self._hello, clock)
        with self._lock:
            self._welcome = welcome
        return welcome.clock

    @property
    def clock(self) -> int:
        """Steps after which the others were when the island joined."""
        return self._joined.clock

    @property
    def has_values(self) -> bool:
        """True if there were values to continue from when the island joined."""
        return self._joined.given is not None

    @abstractmethod
    def catch_up(self) -> Arrived | None:
        """Returns what the others hold, with the clock; None if nobody is there any more that holds it."""

    @abstractmethod
    def start(self, clock: int, initial: Callable[[], Arrays], place: tuple[int, int]) -> Arrived:
        """Returns what an island that begins after some steps reads: waits if it is too far ahead of the others.

        Args:
            clock: its steps.
            initial: makes the values that the others begin with if they hold nothing yet.
            place: the last round that counts for it, if there is no server.
        """

    @abstractmethod
    def exchange(
        self, arrays: Arrays, initial: Callable[[], Arrays], clock: int, tokens: float, loss: float | None = None,
        is_finite: bool = True,
    ) -> Arrived:  # fmt: skip
        """Sends arrays and returns what the island goes on with. Waits for it, as long as the policy says.

        Args:
            arrays: parameters, changes of them, or gradients.
            initial: makes the values that servers begin with which have lost all.
            clock: steps of the island.
            tokens: that it has trained on since the last exchange.
            loss: of its last step.
            is_finite: all values are. Servers look themselves.
        """

    def beat(self) -> None:
        """Gives a sign of life."""
        with self._lock:
            welcome = self._welcome
        if welcome is not None:
            with suppress(SessionOverError, TrainingError):  # which the next exchange meets, too
                self._door.call("heartbeat", self.index, welcome.session)

    def leave(self) -> None:
        """Says goodbye."""
        self._has_left = True
        if self._welcome is not None:
            with suppress(SessionOverError, TrainingError):  # the others have noticed before
                self._door.call("leave", self.index, self._welcome.session)

    def _asked(self, method: str, *args: Any) -> Any:
        """Returns the answer of the coordinator to a question that it may have to be asked again and again."""
        begin = time.monotonic()
        try:
            while (answer := self._call(method, *args)) is None:
                pass
        finally:
            self.waited += time.monotonic() - begin
        return answer

    def _call(self, method: str, *args: Any) -> Any:
        return self._door.call(method, self.index, self._joined.session, *args)

    @property
    def _joined(self) -> Welcome:
        assert self._welcome is not None
        return self._welcome


class ServerlessClient(IslandClient):
    """Goes on from its own values, or from those of another island, which gives them.

    Args:
        door: to the coordinator.
        hello: says who the island is, and what it trains.
        every: steps from one exchange to the next.
    """

    def __init__(self, door: Door, hello: Hello, every: int) -> None:
        super().__init__(door, hello)
        self._every = every

    def catch_up(self) -> Arrived | None:
        """Returns the values of another island after its next exchange."""
        try:
            return self._values(0) if self.has_values else None
        except NobodyError:
            return None
        except SessionOverError:
            self.join()
            return self.catch_up()

    @abstractmethod
    def _values(self, clock: int) -> Arrived:
        """Returns the values of another island, once it has done as many steps. Raises NobodyError."""

    def _stand(self, clock: int, *where: Any) -> Arrived | None:
        """Returns the values of another island, unless this one goes on from its own.

        Args:
            clock: its steps.
            where: it is, for the coordinator.
        """
        while True:
            try:
                return None if self._asked("start", *where) else self._values(clock)
            except NobodyError:
                continue
            except SessionOverError:
                self._join_again(clock)

    def _join_again(self, clock: int) -> None:
        """Joins the others, unless the island has said goodbye while it waited for them in another thread."""
        if self._has_left:
            raise SessionOverError(f"island {self.index} has left")
        self.join(clock)


class ServerClient(IslandClient):
    """Pushes to servers and reads from them, and keeps what it reads in few bits."""

    def __init__(self, door: Door, hello: Hello) -> None:
        super().__init__(door, hello)
        self._version = 0  # of the last read
        self._held: list[Flat] | None = None  # read in this stay, to which messages add

    def join(self, clock: int = 0) -> int:
        """See `IslandClient`."""
        clock = super().join(clock)
        self._version, self._held = self._joined.version, None
        return clock

    def catch_up(self) -> Arrived | None:
        """Returns what the servers hold."""
        return self.read() if self.has_values else None

    def read(self, initial: Callable[[], Arrays] | None = None) -> Arrived:
        """Returns what the servers hold.

        Args:
            initial: makes the values that they begin with if they hold nothing yet.
        """
        welcome, given, version = self._joined, self._joined.given, self._joined.version
        if given is None:
            assert initial is not None
            refs, _ = self._put(initial())
            given, version = self._door.call("begin", self.index, welcome.session, refs)
        return self._arrived(Pulled(given, version, welcome.clock, {}), 0)

    def start(self, clock: int, initial: Callable[[], Arrays], place: tuple[int, int]) -> Arrived:
        """See `IslandClient`."""
        arrived = self.read(initial)
        if clock <= self.clock:
            return arrived
        self._door.call("start", self.index, self._joined.session, clock)
        return self._wait(initial, clock, 0)

    def exchange(
        self, arrays: Arrays, initial: Callable[[], Arrays], clock: int, tokens: float, loss: float | None = None,
        is_finite: bool = True,
    ) -> Arrived:  # fmt: skip
        """Pushes arrays and reads, as long as the policy says; see `IslandClient`."""
        refs, nbytes = self._put(arrays)
        push, version = Push(clock, tokens, refs, nbytes, loss), self._version
        try:
            counts = self._door.call("push", self.index, self._joined.session, push)
        except SessionOverError:
            self.join(clock)
            if not self.has_values:
                return self.read(initial)._replace(clock=clock, counts=False)
            counts = self._door.call("push_late", self.index, self._joined.session, push, version)
        return self._wait(initial, clock, nbytes)._replace(counts=counts)

    def _wait(self, initial: Callable[[], Arrays], clock: int, nbytes: int) -> Arrived:
        begin, pulled = time.monotonic(), None
        held = None if self._held is None else self._version
        try:
            while pulled is None:
                pulled = self._door.call("pull", self.index, self._joined.session, held)
        except SessionOverError:
            self.join(clock)
            return self.read(initial)._replace(nbytes=nbytes)
        finally:
            self.waited += time.monotonic() - begin
        return self._arrived(pulled, nbytes)

    def _put(self, arrays: Arrays) -> tuple[list[Refs], int]:
        """Returns references to what each server gets, and the bytes of all processes of the island."""
        refs = [self._door.put(pieces_of(arrays, parts)) for parts in self._joined.parts]
        return refs, sum(array.nbytes for array in arrays.values())

    def _arrived(self, pulled: Pulled, nbytes: int) -> Arrived:
        self._version = pulled.version
        values, received = self._read_values(pulled)
        self._held = values if self._hello.bits else None
        return Arrived(list(zip(self._joined.parts, values)), pulled.clock, nbytes, pulled.metrics, received)

    def _read_values(self, pulled: Pulled) -> tuple[list[Flat], int]:
        """Returns what each server gives, and the bytes that were read."""
        if pulled.messages is None:
            values = self._door.get(pulled.given)
            return values, sum(x.nbytes for each in values for x in each.values())
        assert self._held is not None
        values, received = self._held, 0
        for refs in pulled.messages:
            messages = self._door.get(refs)
            received += sum(x.nbytes for each in messages for x in each.values())
            values = [with_message(each, message) for each, message in zip(values, messages)]
        return values, received
