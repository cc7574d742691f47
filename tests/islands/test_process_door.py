"""Processes of an island: the first one speaks for all, and all hear the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxtrain.islands.client import read_pieces
from jaxtrain.islands.messages import LostValueError, SessionOverError
from jaxtrain.islands.partition import Spec
from jaxtrain.islands.pieces import TensorPiece, assemble
from jaxtrain.islands.processes.process_door import ProcessDoor

PATH = ("params", "a")


class ThreadMail:
    """Messages between threads; each is taken as often as it was said."""

    def __init__(self) -> None:
        self._messages: dict[Any, Future[Any]] = {}
        self._readers: dict[Any, int] = {}
        self._lock = threading.Lock()

    def _message(self, name: Any) -> Future[Any]:
        with self._lock:
            return self._messages.setdefault(name, Future())

    def post(self, name: Any, value: Any, readers: int) -> None:
        self._readers[name] = readers
        self._message(name).set_result(value)

    def take(self, name: Any) -> Any:
        value = self._message(name).result(20)
        with self._lock:
            self._readers[name] -= 1
            if not self._readers[name]:
                del self._messages[name]
        return value

    @property
    def left(self) -> list[Any]:
        return list(self._messages)


class StoreDoor:
    """A store of values, and a coordinator that notes its calls."""

    is_first = True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.values: dict[int, Any] = {}
        self._lock = threading.Lock()

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if method == "refuse":
            raise SessionOverError
        return args

    def put(self, value: Any) -> list[int]:
        with self._lock:
            self.values[len(self.values)] = value
            return [len(self.values) - 1]

    def get(self, refs: list[int], by_first: bool = False) -> list[Any]:
        return [self.values[ref] for ref in refs]


class LosingDoor(StoreDoor):
    """A process that cannot read."""

    def get(self, refs: list[int], by_first: bool = False) -> list[Any]:
        raise LostValueError("islands: a value is lost (test)")


def of_processes(doors: list[StoreDoor], run: Callable[[ProcessDoor, int], Any]) -> tuple[list[Any], ThreadMail]:
    """What each process returns, or the error that it raises."""
    mail = ThreadMail()

    def one(index: int) -> Any:
        try:
            return run(ProcessDoor(doors[index], mail, index, len(doors)), index)
        except (LostValueError, SessionOverError) as error:
            return type(error)

    with ThreadPoolExecutor(len(doors)) as pool:
        return list(pool.map(one, range(len(doors)))), mail


def test_the_first_process_calls_and_all_have_the_answer() -> None:
    store = StoreDoor()

    def run(door: ProcessDoor, index: int) -> list[Any]:
        return [door.call("ask", index), door.call("heartbeat"), door.call("ask", 10 + index)]

    found, mail = of_processes([store] * 3, run)
    assert found == [[(0,), (), (10,)], [(0,), None, (10,)], [(0,), None, (10,)]]
    assert store.calls == [("ask", 0), ("heartbeat",), ("ask", 10)]
    assert mail.left == []


def test_an_error_of_a_call_is_that_of_all_and_they_go_on_together() -> None:
    def run(door: ProcessDoor, index: int) -> Any:
        with pytest.raises(SessionOverError):
            door.call("refuse")
        return door.call("ask", index)

    found, mail = of_processes([StoreDoor()] * 2, run)
    assert found == [(0,), (0,)]
    assert mail.left == []


def test_a_message_has_the_pieces_of_all_processes() -> None:
    """Two processes hold halves of a tensor, and send it twice: to one receiver each."""
    store = StoreDoor()

    def run(door: ProcessDoor, index: int) -> Any:
        half = {PATH: [TensorPiece((2 * index, 0), np.full((2, 3), index, np.float32))]}
        sent = [door.put(half), door.put(half if index else {})]
        return door.call("send", sent)[0]

    (refs, _), _ = of_processes([store] * 2, run)
    assert [len(each) for each in refs] == [2, 2]
    whole, half = read_pieces(store, refs)
    spec = Spec((4, 3), np.dtype(np.float32))
    expected = np.repeat([0, 0, 1, 1], 3).reshape(4, 3)
    np.testing.assert_array_equal(assemble(whole, {PATH: spec})[PATH], expected)
    with pytest.raises(ValueError, match="pieces of 6 values; expected 12"):
        assemble(half, {PATH: spec})


@pytest.mark.parametrize("losing", [0, 1])
def test_a_value_that_one_process_cannot_read_is_lost_for_all(losing: int) -> None:
    doors = [LosingDoor() if index == losing else StoreDoor() for index in range(2)]
    for door in doors:
        door.values[7] = "value"
    found, mail = of_processes(doors, lambda door, index: door.get([7]))
    assert found == [LostValueError, LostValueError]
    assert mail.left == []


def test_what_only_the_first_process_needs_the_others_do_not_read() -> None:
    doors = [StoreDoor(), LosingDoor()]
    doors[0].values[7] = {PATH: [TensorPiece((0,), np.ones(2))]}
    found, _ = of_processes(doors, lambda door, index: read_pieces(door, [[7]], by_first=True))
    assert len(found[0]) == 1
    assert found[1] == []
