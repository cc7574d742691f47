"""Items made ahead of their use by one background thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates (index, fetch(index)) for start <= index < stop, fetching ahead in a thread.

    `fetch` runs in that thread alone, in order, for one index at a time; it may place batches on devices. At most
    `depth` items are held besides the one the consumer has. An exception of `fetch` is raised where its item would
    have come, with the traceback of the thread. Use as a context manager, or `close` it: the thread then ends after
    the fetch in progress. It is a daemon, so that a forgotten one does not keep the program from ending.

    Attributes:
      waited: seconds the last `next` waited.
    """

    def __init__(self, fetch: Callable[[int], T], start: int, stop: int, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth {depth}: at least 1 item must be fetched ahead")
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
            except BaseException as error:  # whatever it is, the consumer gets it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(item)
                self._changed.notify_all()
            del item  # the consumer may want its memory back

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> tuple[int, T]:
        """The next (index, item).

        Raises:
          StopIteration: after the last, or when closed.
          Exception: whatever `fetch` raised; the same again on the next call.
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
        """End the thread and drop what it had made. May be called twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
