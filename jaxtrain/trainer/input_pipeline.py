"""Device batches for the loop, made ahead of their use, without those that are passed over."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from jaxtrain.data.prefetch import Prefetcher
from jaxtrain.data.skipped_batches import Skips, batch_of

DEPTH = 2  # batches made ahead


class BatchFeed:
    """The batch of any step; those of the steps after it are fetched meanwhile. Use as a context manager.

    Args:
      fetch: batch index -> device batch; runs in one thread.
      skips: the ranges of batches that are passed over, as they are when a step is asked for out of turn.
      stop: steps of the run.
    """

    def __init__(self, fetch: Callable[[int], Any], skips: Callable[[], Skips], stop: int) -> None:
        self._fetch, self._skips, self._stop = fetch, skips, stop
        self._next, self._ahead = -1, None

    def batch_at(self, step: int) -> Any:
        """The batch of a step, counted from 0. In turn it is ready, or waited for; else fetching begins anew there."""
        if self._ahead is None or step != self._next:
            self.close()
            skips = self._skips()
            self._ahead = Prefetcher(lambda step: self._fetch(batch_of(step, skips)), step, self._stop, DEPTH)
        self._next = step + 1
        return next(self._ahead)[1]

    def close(self) -> None:
        """Ends the thread, and drops what it had made."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()
