"""Data from iterables of batches: generators, lists, loaders."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxtrain.data.dataset import Rows
from jaxtrain.data.objects.batch_arrays import Spec, check_rows, check_same_spec, one_line, spec_of, to_arrays
from jaxtrain.data.objects.iterator_state import decode, encode, state_methods
from jaxtrain.data.objects.shard import WHOLE, DataShard, reading
from jaxtrain.errors import DataError, EndOfData, UnreadableBatchError

RECENT = 12  # batches that are kept, and their states: more than are read ahead of the one that is trained on
KEPT_BYTES = 1 << 30  # of these batches


class IterableData:
    """Batches of an iterable, one after the other. A step that was passed needs the iterable opened again.

    Safe to be used by several threads. What the last batches were, and the state of the iterator after each of them,
    is kept, because batches are read ahead of the one that is trained on.

    Args:
        source: an iterable of batches, or a function that returns one. One that is its own iterator, such as a
            generator, can be read once.
        global_batch: rows of a step.
        name: of the argument, for messages.
        shard: rows of this process, for `data_shard`.
        is_local: batches have only the rows of `shard`.

    Attributes:
        source, name, shard, is_local: as given.
        is_repeated: True if it begins again at its end, as `epochs` asks for.
        on_batch: called with (index, batch) for each batch that is read.
        state_problem: why the state of the iterator cannot be saved, or None.
    """

    def __init__(
        self, source: Any, global_batch: int, name: str = "data", shard: DataShard = WHOLE, is_local: bool = False
    ) -> None:
        self.name, self.source, self._global_batch = name, source, global_batch
        self.is_repeated, self.on_batch = False, _ignore
        self.state_problem: str | None = None
        self._lock = threading.RLock()
        self._iterator: Iterator[Any] | None = None
        self._methods: tuple[Callable[[], Any], Callable[[Any], Any], bool] | None = None
        self._next, self._epoch_begin = 0, 0  # index of the batch that the iterator returns next; of its first one
        self._recent: dict[int, dict[str, np.ndarray]] = {}
        self._states: dict[int, dict[str, Any]] = {}  # index of a batch -> place after it
        self._first: dict[str, np.ndarray] | None = None
        self._length: int | None = None  # of what the function returned last
        self._spec: Spec | None = None
        self.share(shard, is_local)

    def share(self, shard: DataShard, is_local: bool) -> None:
        """Sets which rows of the global batch are this process's, and if its batches have only those."""
        self.shard, self.is_local = shard, is_local
        self._rows = self._global_batch // shard.count if is_local else self._global_batch
        self._position = np.arange(self._global_batch)  # of a row of the global batch in a batch
        if is_local and shard.count > 1:
            self._position = np.full(self._global_batch, -1)
            self._position[list(shard.rows)] = np.arange(self._rows)

    @property
    def batches(self) -> int | None:
        """Batches of an epoch; None if the iterable has no length, or none that is known before it is opened."""
        return self._length if callable(self.source) else _length(self.source)

    @property
    def is_reopenable(self) -> bool:
        """True if the batches can be read again from the first one."""
        return callable(self.source) or not isinstance(self.source, Iterator)

    def check_can_go_back(self) -> None:
        """Raises DataError if a batch that was read cannot be read again, from its first one or by its state."""
        if not self.is_reopenable and (state_methods(self.source, self.source) is None or self.state_problem):
            raise self._cannot_go_back()

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns a batch, or some of its rows, by their positions in the global batch.

        Raises:
            DataError: the step was passed and the source cannot be read again, or a batch has another form, or cannot
                be read.
            EndOfData: there are fewer batches.
        """
        with self._lock:
            batch = self._at(step)
        if rows is None or (isinstance(rows, slice) and rows == slice(None)):
            return batch
        return {key: value[self._position[rows]] for key, value in batch.items()}

    def first_batch(self) -> dict[str, np.ndarray]:
        """Returns the first batch that was read, which is batch 0 unless it was resumed; reads one if there is none."""
        if self._first is None:
            self.batch(0)
        assert self._first is not None
        return self._first

    def first_row(self) -> dict[str, np.ndarray]:
        """Returns the first row of that batch."""
        return {key: value[:1] for key, value in self.first_batch().items()}

    def with_own_iterator(self) -> IterableData:
        """Returns the same data read by another iterator, or this one if that could disturb it."""
        if not callable(self.source) and not isinstance(self.source, list | tuple):
            return self
        other = IterableData(self.source, self._global_batch, self.name, self.shard, self.is_local)
        other.is_repeated = self.is_repeated
        return other

    def state_after(self, index: int) -> dict[str, Any] | None:
        """Returns the place after a batch, of JSON values; None without a state of the iterator."""
        with self._lock:
            found = self._states.get(index)
        if found is None:
            return None
        try:
            return found | {"state": encode(found["state"])}
        except TypeError as error:
            self.state_problem = f"its state holds {error}"
            return None

    def restore_state(self, place: dict[str, Any]) -> None:
        """Continues at a place that `state_after` returned.

        Raises:
            DataError: the iterator refuses it.
        """
        with self._lock:
            try:
                found = place | {"state": decode(place["state"])}
                opened = self._opened()
                methods = state_methods(opened, opened)
                with reading(self.shard):
                    if methods is not None:  # of the iterable, before it is iterated
                        methods[1](found["state"])
                    self._iterator = iter(opened)
                    self._methods = state_methods(opened, self._iterator)
                    if methods is None and self._methods is not None:
                        self._methods[1](found["state"])
            except DataError:
                raise
            except Exception as error:
                message = f"its saved state does not fit: {one_line(error)}"
                raise DataError(f"{self.name}: {message}; expected the data that the run began with") from error
            self._next, self._epoch_begin = found["next"], found["begin"]
            self._recent.clear()
            self._states = {self._next - 1: found}

    @property
    def keeps_state(self) -> bool:
        """True if the iterator has a state that can be saved."""
        return self._methods is not None and self.state_problem is None

    def _at(self, step: int) -> dict[str, np.ndarray]:
        if step in self._recent:
            return self._recent[step]
        if self._iterator is None or step < self._next:
            self._open()
        while self._next <= step:
            batch = self._read()
            self._next += 1
            self._recent[self._next - 1] = batch
            size = sum(value.nbytes for value in batch.values())
            while len(self._recent) > max(1, min(RECENT, KEPT_BYTES // max(size, 1))):
                del self._recent[next(iter(self._recent))]
        self._keep_state(step)
        return self._recent[step]

    def _opened(self) -> Any:
        if self._iterator is not None and not self.is_reopenable and self._methods is None:
            raise self._cannot_go_back()
        with reading(self.shard):
            return self.source() if callable(self.source) else self.source

    def _cannot_go_back(self) -> DataError:
        message = f"its first batch was read already, and {type(self.source).__name__} cannot be read twice"
        return DataError(f"{self.name}: {message}; expected a function that returns it, or a list")

    def _open(self) -> None:
        if self._iterator is not None and not self.is_reopenable:
            raise self._cannot_go_back()
        self._recent.clear()
        self._begin(0)

    def _begin(self, index: int) -> None:
        """Opens the iterable; its first batch has this index."""
        try:
            opened = self._opened()
            with reading(self.shard):
                self._iterator = iter(opened)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self.name}: cannot be opened: {one_line(error)}") from error
        self._methods, self._length = state_methods(opened, self._iterator), _length(opened)
        self._next = self._epoch_begin = index

    def _read(self) -> dict[str, np.ndarray]:
        assert self._iterator is not None
        place = f"{self.name}: batch {self._next}"
        try:
            with reading(self.shard):
                found = next(self._iterator)
        except StopIteration:
            if self.is_repeated and self._next > self._epoch_begin:
                self._begin(self._next)
                return self._read()
            raise EndOfData(f"{self.name}: it ends after {self._next} batches") from None
        except DataError:
            raise
        except Exception as error:
            raise UnreadableBatchError(f"{place} cannot be read: {one_line(error)}") from error
        batch = to_arrays(found, place, copy=True)  # a loader may fill the same arrays again while this is in flight
        reason = "data.global_batch" if self._rows == self._global_batch else "data.global_batch / shards of the data"
        check_rows(batch, self._rows, place, reason)
        spec = spec_of(batch)
        check_same_spec(spec, self._spec or spec, place)
        self._spec, self._first = spec, self._first or batch
        self.on_batch(self._next, batch)
        return batch

    def _keep_state(self, index: int) -> None:
        """Keeps the state of the iterator, which has just returned a batch. Those of passed batches are dropped."""
        if not self.keeps_state or index != self._next - 1 or index in self._states:
            return
        assert self._methods is not None
        try:
            with reading(self.shard):
                state = copy.deepcopy(self._methods[0]())
        except Exception as error:
            self.state_problem = f"its state cannot be read: {one_line(error)}"
            return
        self._states[index] = {"next": index + 1, "begin": self._epoch_begin, "state": state}
        while len(self._states) > RECENT:
            del self._states[next(iter(self._states))]


def separate(data: Any) -> Any:
    """Returns an iterable that is read by an iterator of its own, where it can be; other data as it is."""
    return data.with_own_iterator() if isinstance(data, IterableData) else data


def _length(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None


def _ignore(index: int, batch: dict[str, np.ndarray]) -> None:
    """Does nothing."""
