"""Door of an island of several processes: the first one speaks for all, and each puts what its devices hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jaxtrain.islands.client import Door, Refs
from jaxtrain.islands.messages import LostValueError

BY_FIRST = ("heartbeat", "leave")  # calls of which nobody waits for the answer, maybe of another thread


class Mail(Protocol):
    """Messages between the processes of an island."""

    def post(self, name: Any, value: Any, readers: int) -> None:
        """Leaves a message that so many processes take."""
        ...

    def take(self, name: Any) -> Any:
        """Returns a message. Waits for it."""
        ...


class ProcessDoor:
    """Door of a process of an island, all of which make the same calls in the same order.

    The first process calls the coordinator, with the references of all, and the others get its answers, or its errors.
    All read the same values, or none does.

    Args:
        door: of this process.
        mail: between the processes of the island.
        process: index of this one.
        processes: their number.
    """

    def __init__(self, door: Door, mail: Mail, process: int, processes: int) -> None:
        self._door, self._mail = door, mail
        self.is_first, self._process, self._others = process == 0, process, range(1, processes)
        self._number = 0
        self._put: list[Refs] = []  # since the last call

    def call(self, method: str, *args: Any) -> Any:
        """Returns what a method of the coordinator returns, or raises what it raises."""
        if method in BY_FIRST:
            return self._door.call(method, *args) if self.is_first else None
        self._number += 1
        self._collect_refs()
        answer, error = self._shared("answer", lambda: _outcome(lambda: self._door.call(method, *args)))
        if error is not None:
            raise error
        return answer

    def put(self, value: Any) -> Refs:
        """Returns references to pieces of values; those of the other processes join them before the next call."""
        refs = self._door.put(value)
        self._put.append(refs)
        return refs

    def get(self, refs: list[Any], by_first: bool = False) -> list[Any]:
        """Returns the values of references.

        Args:
            refs: the references.
            by_first: only the first process needs them; the others get an empty list.

        Raises:
            LostValueError: a process cannot read one of them.
        """
        self._number += 1
        values, error = _outcome(lambda: self._door.get(refs) if self.is_first or not by_first else [], LostValueError)
        found = [error, *self._gathered("read", error)]
        error = self._shared("verdict", lambda: next((each for each in found if each is not None), None))
        if error is not None:
            raise error
        return values

    def _collect_refs(self) -> None:
        """Adds the references of the other processes to those of the first one."""
        if self._put:
            for others in self._gathered("refs", self._put):
                for refs, more in zip(self._put, others, strict=True):
                    refs.extend(more)
        self._put = []

    def _gathered(self, kind: str, value: Any) -> list[Any]:
        """Returns what the other processes have of a kind, in the first one; else nothing."""
        if self.is_first:
            return [self._mail.take((kind, self._number, process)) for process in self._others]
        self._mail.post((kind, self._number, self._process), value, 1)
        return []

    def _shared(self, kind: str, make: Callable[[], Any]) -> Any:
        """Returns what the first process makes."""
        if not self.is_first:
            return self._mail.take((kind, self._number))
        value = make()
        self._mail.post((kind, self._number), value, len(self._others))
        return value


def _outcome(make: Callable[[], Any], kind: type[Exception] = Exception) -> tuple[Any, Exception | None]:
    try:
        return make(), None
    except kind as error:
        return None, error
