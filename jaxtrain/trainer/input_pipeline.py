"""Prefetched device batches for the training loop, without skipped ones."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from jaxtrain.data.prefetch import Prefetcher
from jaxtrain.data.skipped_batches import BatchRanges, batch_index

DEPTH = 2  # prefetched batches


class BatchFeed:
    """Returns the batch of any step and prefetches those of the next steps. Use as a context manager.

    Args:
      fetch: batch index -> device batch; runs in one thread.
      skips: returns the ranges of skipped batches; read whenever fetching restarts.
      stop: total steps of the run.
    """

    def __init__(self, fetch: Callable[[int], Any], skips: Callable[[], BatchRanges], stop: int) -> None:
        self._fetch, self._skips, self._stop = fetch, skips, stop
        self._next, self._ahead = -1, None

    def batch_at(self, step: int) -> Any:
        """Returns the batch of a step, from 0. A step that does not follow the last one restarts the prefetching."""
        if self._ahead is None or step != self._next:
            self.close()
            skips = self._skips()
            self._ahead = Prefetcher(lambda step: self._fetch(batch_index(step, skips)), step, self._stop, DEPTH)
        self._next = step + 1
        return next(self._ahead)[1]

    def close(self) -> None:
        """Ends the thread and drops prefetched batches."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()
