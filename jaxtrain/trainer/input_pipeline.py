"""Prefetched device batches for the training loop, without skipped ones."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from jaxtrain.data.prefetch import Prefetcher
from jaxtrain.data.skipped_batches import BatchRanges, batch_index
from jaxtrain.trainer.data.batch_reader import LOOK_AHEAD, BatchReader

DEPTH = 2  # prefetched batches


class BatchFeed:
    """Returns the batch of any step and prefetches those of the next steps. Use as a context manager.

    Args:
      fetch: batch index -> device batch; runs in one thread.
      skips: returns the ranges of skipped batches; read whenever fetching restarts.
      stop: total steps of the run.
      reader: reads the batches that `fetch` places.
    """

    def __init__(
        self, fetch: Callable[[int], Any], skips: Callable[[], BatchRanges], stop: int, reader: BatchReader
    ) -> None:
        self._fetch, self._skips, self._stop, self._reader = fetch, skips, stop, reader
        self._next, self._ahead = -1, None

    def batch_at(self, step: int) -> Any:
        """Returns the batch of a step, from 0. A step that does not follow the last one restarts the prefetching."""
        if self._ahead is None or step != self._next:
            self.close()
            skips = self._skips()
            self._reader.begin(self._indices(step, skips))
            self._ahead = Prefetcher(lambda step: self._make(self._indices(step, skips)), step, self._stop, DEPTH)
        self._next = step + 1
        return next(self._ahead)[1]

    def _indices(self, step: int, skips: BatchRanges) -> list[int]:
        """Returns the batches of a step and of those after it that are read ahead."""
        return [batch_index(later, skips) for later in range(step, min(step + LOOK_AHEAD + 1, self._stop))]

    def _make(self, indices: list[int]) -> Any:
        self._reader.prepare(indices)
        return self._fetch(indices[0])

    def close(self) -> None:
        """Ends the thread and drops prefetched batches."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()
