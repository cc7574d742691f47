"""Prefetching in a background thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates over (index, fetch(index)) for start <= index < stop, fetching ahead in a daemon thread.

    The thread calls `fetch` for one index at a time, in order; it may place batches on devices. An exception of `fetch`
    is raised in place of its item, with the traceback of the thread. Use it as a context manager or call `close`: the
    thread then ends after the fetch in progress.

    Args:
      fetch: returns the item of an index.
      start, stop: range of indices.
      depth: maximum number of items that are held in advance.

    Attributes:
      waited: seconds that the last `next` waited.
    """

    def __init__(self, fetch: Callable[[int], T], start: int, stop: int, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth {depth}: must be at least 1")
        self.waited = 0.0
        self._fetch, self._next, self._stop, self._depth = fetch, start, stop, depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(start,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, start: int) -> None:
        for index in range(start, self._stop):
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    return
            try:
                item = self._fetch(index)
            except BaseException as error:  # the consumer raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(item)
                self._changed.notify_all()
            del item  # the consumer owns its memory

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> tuple[int, T]:
        """Returns the next (index, item).

        Raises:
          StopIteration: after the last, or when closed.
          Exception: that of `fetch`; again on the next call.
        """
        if self._next >= self._stop:
            raise StopIteration
        begin = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            self.waited = time.perf_counter() - begin
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
            elif self._error is None:
                raise StopIteration
            elif isinstance(self._error, StopIteration):
                raise RuntimeError("fetch raised StopIteration") from self._error
            else:
                raise self._error
        self._next += 1
        return self._next - 1, item

    def close(self) -> None:
        """Ends the thread and drops its items. May be called twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
