"""The prefetcher: order, bounded depth, errors with their traceback, no thread left behind."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import pytest

from jaxtrain.data.prefetch import Prefetcher


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "prefetch"]


def wait_for(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


def test_order_and_end() -> None:
    with Prefetcher(lambda i: i * i, 3, 8, depth=2) as items:
        assert list(items) == [(i, i * i) for i in range(3, 8)]
        with pytest.raises(StopIteration):
            next(items)
    assert wait_for(lambda: not prefetch_threads())


def test_fetches_at_most_depth_ahead_and_in_another_thread() -> None:
    made: list[int] = []
    threads = set()

    def fetch(i: int) -> int:
        threads.add(threading.current_thread())
        made.append(i)
        return i

    with Prefetcher(fetch, 0, 100, depth=3) as items:
        assert wait_for(lambda: len(made) == 3)
        time.sleep(0.05)
        assert made == [0, 1, 2]
        next(items)
        assert wait_for(lambda: made == [0, 1, 2, 3])
    assert threading.main_thread() not in threads


def test_error_reaches_the_consumer_with_its_traceback() -> None:
    def deep_in_fetch(i: int) -> int:
        if i == 2:
            raise KeyError("row 7")
        return i

    with Prefetcher(deep_in_fetch, 0, 10, depth=4) as items:
        assert [next(items)[0] for _ in range(2)] == [0, 1]
        for _ in range(2):  # and again, if asked again
            with pytest.raises(KeyError, match="row 7") as caught:
                next(items)
            assert "deep_in_fetch" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert wait_for(lambda: not prefetch_threads())


def test_stop_iteration_in_fetch_is_an_error() -> None:
    with (
        Prefetcher(lambda i: next(iter(())), 0, 3, depth=1) as items,
        pytest.raises(RuntimeError, match="StopIteration"),
    ):
        next(items)


def test_waited_seconds() -> None:
    def slow_first(i: int) -> int:
        time.sleep(0.2 if i == 0 else 0)
        return i

    with Prefetcher(slow_first, 0, 3, depth=2) as items:
        next(items)
        assert 0.1 < items.waited < 5
        time.sleep(0.05)
        next(items)
        assert items.waited < 0.05


def test_close_ends_a_waiting_thread_and_drops_items() -> None:
    class Item:
        pass

    alive: list[weakref.ref] = []

    def fetch(i: int) -> Item:
        item = Item()
        alive.append(weakref.ref(item))
        return item

    items = Prefetcher(fetch, 0, 10**9, depth=2)
    assert wait_for(lambda: len(alive) == 2)
    items.close()
    items.close()
    assert not prefetch_threads()
    with pytest.raises(StopIteration):
        next(items)
    gc.collect()
    assert not any(ref() for ref in alive)


def test_an_item_taken_is_not_kept_by_the_thread() -> None:
    class Item:
        pass

    go_on = threading.Event()

    def fetch(i: int) -> Item:
        if i == 1:
            go_on.wait(10)
        return Item()

    with Prefetcher(fetch, 0, 3, depth=1) as items:
        _, item = next(items)
        ref = weakref.ref(item)
        del item
        assert wait_for(lambda: ref() is None)  # while the next is being fetched
        go_on.set()


def test_exception_in_the_consumer_closes() -> None:
    def consume() -> None:
        with Prefetcher(lambda i: i, 0, 10, depth=1) as items:
            for index, _ in items:
                raise ValueError(f"consumer failed at {index}")

    with pytest.raises(ValueError, match="failed at 0"):
        consume()
    assert not prefetch_threads()


def test_interrupt_while_waiting() -> None:
    """Ctrl-C reaches a consumer that waits for an item, and the program ends at once."""
    script = (
        "import signal, time\n"
        "from jaxtrain.data.prefetch import Prefetcher\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell leaves it ignored
        "items = Prefetcher(lambda i: time.sleep(60), 0, 5, 2)\n"
        "print('waiting', flush=True)\n"
        "try:\n    next(items)\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert out == "interrupted\n"
    assert process.returncode == 0


def test_depth_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Prefetcher(lambda i: i, 0, 1, 0)
