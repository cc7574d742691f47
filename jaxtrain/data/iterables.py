"""Data from objects: anything with `batch(step, rows)`, iterables of batches, arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.data.dataset import Dataset, Rows
from jaxtrain.errors import DataError, EndOfData


def as_dataset(source: Any, global_batch: int, seed: int = 0, name: str = "data") -> Any:
    """Returns the dataset of an object.

    Args:
        source: has `batch(step, rows)`; or is a {name: array} of all rows; or an iterable of batches, or a function
            that returns one, whose batches are {name: array} of `global_batch` rows, the same on every process.
        global_batch: rows of a step.
        seed: of the order of the rows of arrays.
        name: of the argument, for messages.

    Raises:
        DataError: none of these.
    """
    if isinstance(source, Dataset):
        return source
    if isinstance(source, Mapping):
        return ArrayData(source, global_batch, seed, name)
    if callable(source) or isinstance(source, Iterable):
        return IterableData(source, global_batch, name)
    expected = "an object with `batch(step, rows)`, a {name: array} of rows, or an iterable of batches"
    raise DataError(f"{name}: {type(source).__name__} is no data; expected {expected}")


class ArrayData:
    """Rows of arrays in the order of (seed, step): each epoch once, in a new permutation.

    Args:
        arrays: {name: array [rows, ...]}.
        global_batch: rows of a step.
        seed: of the order.
        name: of the argument, for messages.

    Attributes:
        batches: steps of an epoch; the rows that fill no batch are left out of it.
        fingerprint: digest of shapes, dtypes and values.

    Raises:
        DataError: no arrays, of different numbers of rows, or of fewer rows than a batch.
    """

    def __init__(self, arrays: Mapping[str, Any], global_batch: int, seed: int = 0, name: str = "data") -> None:
        self._arrays = {key: np.asarray(value) for key, value in arrays.items()}
        lengths = {key: len(value) if value.ndim else 0 for key, value in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{name}: arrays of {lengths} rows; expected the same number in each")
        self._rows, self._global_batch, self._seed = next(iter(lengths.values())), global_batch, seed
        if self._rows < global_batch:
            raise DataError(f"{name}: {self._rows} rows are fewer than data.global_batch {global_batch}")
        self.batches = self._rows // global_batch
        digest = hashlib.sha256()
        for key in sorted(self._arrays):
            array = np.ascontiguousarray(self._arrays[key])
            digest.update(f"{key} {array.shape} {array.dtype}".encode())
            digest.update(array.tobytes())
        self.fingerprint = digest.hexdigest()[:16]

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns the rows of a step."""
        epoch, index = divmod(step, self.batches)
        order = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
        chosen = order[index * self._global_batch : (index + 1) * self._global_batch]
        chosen = chosen if rows is None else chosen[rows]
        return {key: value[chosen] for key, value in self._arrays.items()}


class IterableData:
    """Batches of an iterable, one after the other. A step that was passed needs the iterable opened again.

    Args:
        source: an iterable of batches, or a function that returns one. One that is its own iterator, such as a
            generator, can be read once.
        global_batch: rows of a batch.
        name: of the argument, for messages.
    """

    def __init__(self, source: Any, global_batch: int, name: str = "data") -> None:
        self._source, self._global_batch, self._name = source, global_batch, name
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # index of the batch that the iterator returns next
        self._last: dict[str, np.ndarray] = {}  # the batch before that
        self._spec: dict[str, tuple[Any, ...]] | None = None

    @property
    def is_reopenable(self) -> bool:
        """True if the batches can be read again from the first one."""
        return callable(self._source) or not isinstance(self._source, Iterator)

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns a batch, or some of its rows.

        Raises:
            DataError: the step was passed and the source cannot be read again, or a batch has another form.
            EndOfData: there are fewer batches.
        """
        if self._iterator is None or step < self._next - 1:
            self._open(step)
        while self._next <= step:
            self._last = self._read()
            self._next += 1
        return self._last if rows is None else {key: value[rows] for key, value in self._last.items()}

    def first_digest(self) -> bytes:
        """Returns a digest of the first batch, by which processes compare their iterables."""
        digest = hashlib.sha256()
        for key, value in sorted(self.batch(0).items()):
            digest.update(f"{key} {value.shape} {value.dtype}".encode() + np.ascontiguousarray(value).tobytes())
        return digest.digest()

    def _open(self, step: int) -> None:
        if self._iterator is not None and not self.is_reopenable:
            message = f"batch {step} was read already, and {type(self._source).__name__} cannot be read twice"
            raise DataError(f"{self._name}: {message}; expected a function that returns it, or a list")
        source: Callable[[], Iterable[Any]] | Iterable[Any] = self._source
        self._iterator, self._next = iter(source() if callable(source) else source), 0

    def _read(self) -> dict[str, np.ndarray]:
        assert self._iterator is not None
        try:
            found = next(self._iterator)
        except StopIteration:
            raise EndOfData(f"{self._name}: it ends after {self._next} batches") from None
        if not isinstance(found, Mapping):
            raise DataError(f"{self._name}: a batch is {type(found).__name__}; expected a dict of arrays")
        batch = {str(key): np.asarray(value) for key, value in found.items()}
        spec = {key: (value.shape, value.dtype) for key, value in batch.items()}
        for key, (shape, _) in spec.items():
            if shape[:1] != (self._global_batch,):
                message = f"`{key}` of batch {self._next} has the shape {shape}"
                raise DataError(f"{self._name}: {message}; expected {self._global_batch} rows (data.global_batch)")
        if self._spec is not None and spec != self._spec:
            names = sorted(key for key in spec.keys() | self._spec.keys() if spec.get(key) != self._spec.get(key))
            before, now = (_describe(one.get(names[0])) for one in (self._spec, spec))
            message = f"`{names[0]}` of batch {self._next} is {now}, and it was {before} before"
            raise DataError(f"{self._name}: {message}; expected one shape and dtype")
        self._spec = spec
        return batch


def _describe(spec: tuple[Any, ...] | None) -> str:
    return "absent" if spec is None else f"{spec[1]}{list(spec[0])}"
