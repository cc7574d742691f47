"""Reading of training batches in the prefetching thread, so that the end of the data ends all processes together.

A process whose data has ended, or cannot be read, makes no further step, and the others would wait for it in the
collectives of that step. So each process reads `LOOK_AHEAD` batches ahead of the one that it places on the devices, and
writes the number of its batches into the key-value store as soon as it knows it, before it makes another step. The
others look there, in the thread, whenever they read. `LOOK_AHEAD` lets them see it in time:

The thread fetches the batch of step n when the training thread has taken that of step n - 2 (`input_pipeline.DEPTH`).
So it has dispatched step n - 3 and has read the metrics of step n - 4, which need every process. Each of them had
fetched the batch of step n - 4 before, and read up to the batch of step n, so an end there is in the store by now. All
look up to `LOOK_AHEAD` batches ahead, and then meet once, before the first step after a start or a rewind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.data.dataset import Rows
from jaxtrain.data.objects.batch_arrays import digest, one_line
from jaxtrain.data.objects.iterables import IterableData
from jaxtrain.distributed.kv_store import KeyValueStore
from jaxtrain.distributed.multihost import broadcast, first_message
from jaxtrain.errors import BatchError, EndOfData, UnreadableBatchError, UserError

ERRORS = {"": EndOfData, **{error.__name__: error for error in (BatchError, UnreadableBatchError)}}
LOOK_AHEAD = 4  # batches, see above
DIGEST_EVERY = 100  # batches between comparisons of their content


@dataclass(frozen=True)
class End:
    """End of the data of a process.

    Attributes:
        batches: number of batches before it, skipped ones included.
        text: reason.
        error: class of the error, if a batch cannot be made; empty: the data ends.
    """

    batches: int
    text: str
    error: str = ""


class BatchReader:
    """Reads the batches of training data; errors are passed on as they are.

    Args:
        data: the data.

    Attributes:
        rows: of the global batch that this process reads.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self.rows: Rows = None

    def begin(self, indices: Sequence[int]) -> None:
        """Called on the training thread before the batches of these indices, and later ones, are read."""

    def prepare(self, indices: Sequence[int]) -> None:
        """Called in the prefetching thread before the first of these batches, which follow each other, is placed."""

    def batch(self, index: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns rows of a batch."""
        return self._data.batch(index, rows)


class SingleReader(BatchReader):
    """Reader of the only process of a run, which saves its state when a batch cannot be made.

    Args:
        data: the data.
    """

    def batch(self, index: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns rows of a batch. Raises EndOfData, or BatchError if it cannot be made."""
        try:
            return super().batch(index, rows)
        except EndOfData:
            raise
        except Exception as error:
            raise batch_error(index, error) from error


class JointReader(BatchReader):
    """Reader of one of several processes: all end at the same step. Every process creates one together.

    Args:
        data: the data.
    """

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        number = broadcast(time.time_ns() % 2**31)  # tells it from those of other runs of these processes
        self._ends = KeyValueStore(f"jaxtrain/data-end/{number}")
        self._digests = KeyValueStore(f"jaxtrain/data-digest/{number}")
        self._process = jax.process_index()
        self._ready: dict[int, dict[str, np.ndarray]] = {}
        self._end: End | None = None  # the first one, of any process
        self._is_ended = False  # the data of this process
        self._pending: tuple[int, str] | None = None  # batch to compare, and its digest
        peers = data.shard.peers if isinstance(data, IterableData) and data.is_local else range(jax.process_count())
        self._leader, self._has_peers = peers[0], len(peers) > 1
        if isinstance(data, IterableData) and self._has_peers:
            data.on_batch = self._note_digest

    def begin(self, indices: Sequence[int]) -> None:
        """Reads ahead on all processes, before any of them makes a step."""
        self._ready.clear()
        self._read(indices)
        broadcast(0)

    def prepare(self, indices: Sequence[int]) -> None:
        """Reads ahead, tells the others of an end, and learns of theirs."""
        for passed in [index for index in self._ready if index < indices[0]]:
            del self._ready[passed]
        self._read(indices)
        if len(indices) > LOOK_AHEAD and not self._is_ended and (text := self._difference()):
            self._tell(End(indices[-1], text, BatchError.__name__))
        self._learn()

    def batch(self, index: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns rows of a batch. Raises EndOfData or BatchError at the same index on every process."""
        if self._end is not None and index >= self._end.batches:
            raise ERRORS[self._end.error](self._end.text)
        return self._ready.pop(index) if index in self._ready else super().batch(index, rows)

    def _read(self, indices: Sequence[int]) -> None:
        for index in indices:
            if self._is_ended or index in self._ready:
                continue
            try:
                self._ready[index] = self._data.batch(index, self.rows)
            except EndOfData as end:
                self._tell(End(index, str(end)))
            except Exception as error:
                found = batch_error(index, error)
                self._tell(End(index, str(found), type(found).__name__))

    def _tell(self, end: End) -> None:
        self._is_ended = True
        self._ends.put(str(self._process), json.dumps(asdict(end)))

    def _learn(self) -> None:
        try:
            found = self._ends.entries()
        except jax.errors.JaxRuntimeError:  # the service ends with process 0, and this process with it
            return
        ends = {int(process): End(**json.loads(text)) for process, text in found.items()}
        if ends:
            process, end = min(ends.items(), key=lambda item: (item[1].batches, item[0]))
            self._end = End(end.batches, f"{end.text} (process {process})", end.error)

    def _note_digest(self, index: int, batch: dict[str, np.ndarray]) -> None:
        """Publishes the digest of a batch now and then, or keeps it, to be compared with that of the first process."""
        if index == 0 or index % DIGEST_EVERY:  # the first ones are compared when the data is opened
            return
        found = digest(batch).hex()
        if self._process == self._leader:
            self._digests.put(str(self._leader), f"{index} {found}", overwrite=True)
        else:
            self._pending = index, found

    def _difference(self) -> str | None:
        """Describes how a batch of this process differs from that of its leader, or returns None."""
        text = None if self._pending is None else self._digests.get(str(self._leader))
        if self._pending is None or text is None:
            return None
        (index, own), (published, other) = self._pending, text.split()
        if int(published) < index:
            return None  # not there yet
        self._pending = None
        if int(published) > index or own == other:
            return None
        return f"data: batch {index} differs between processes {self._leader} and {self._process}; {SAME}"


SAME = 'expected the same batches on all that hold the same rows, or rows="local" for batches of a process\'s own rows'


class JointEvaluationData:
    """Validation data of one of several processes, whose end or error on any of them is that of all.

    Args:
        data: the data. All processes read the same batches in the same order, on the main thread.
    """

    def __init__(self, data: IterableData) -> None:
        self._data = data

    def batch(self, index: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns rows of a batch. Raises EndOfData or BatchError on every process together."""
        found, end, error = {}, None, None
        try:
            found = self._data.batch(index, rows)
        except EndOfData as reason:
            end = str(reason)
        except Exception as reason:
            error = str(batch_error(index, reason))
        if (text := first_message(error or end)) is None:
            return found
        problem = first_message(error)
        raise EndOfData(text) if problem is None else BatchError(problem)


def batch_error(index: int, error: Exception) -> BatchError:
    """Returns the error of a batch that cannot be made, in one line."""
    if isinstance(error, BatchError):
        return error
    if isinstance(error, UserError):
        return BatchError(str(error))
    return UnreadableBatchError(f"data: batch {index} cannot be made: {one_line(error)}")


def make_reader(data: Any, is_text: bool) -> BatchReader:
    """Returns the reader of this process. All processes call it together.

    Several processes do not agree on an end of tokenized text, which has none; what fails there ends the process.
    """
    if jax.process_count() == 1:
        return SingleReader(data)
    return BatchReader(data) if is_text else JointReader(data)
