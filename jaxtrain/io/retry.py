"""Retries with increasing delays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

RETRY_DELAYS = (1.0, 5.0, 20.0, 60.0)  # seconds before the second try, the third, ...
T = TypeVar("T")


class RetryError(Exception):
    """Every try failed, or the retries were stopped. `reason` is that of the last try, `tries` their number."""

    def __init__(self, reason: str, tries: int) -> None:
        super().__init__(reason)
        self.reason, self.tries = reason, tries


def retry(
    attempt: Callable[[], T],
    delays: Sequence[float],
    stop: threading.Event,
    on_failure: Callable[[Exception], str],
    on_retry: Callable[[str, float, str], object],
) -> T:
    """Calls `attempt` until it succeeds, at most `len(delays) + 1` times, and returns its result.

    Args:
      attempt: the function to call.
      delays: seconds between tries.
      stop: set to prevent further tries; a try in progress is not interrupted.
      on_failure: cleans up after a failed try and returns its reason in one line.
      on_retry: called with (reason, seconds until the next try, "2 of 5") before each delay.

    Raises:
      RetryError: the last try failed, or `stop` was set.
    """
    for number, delay in enumerate((*delays, None), start=1):
        try:
            return attempt()
        except Exception as error:  # storage libraries raise errors of many classes
            reason = on_failure(error)
            if delay is None or stop.is_set():
                raise RetryError(reason, number) from error
            on_retry(reason, delay, f"{number + 1} of {len(delays) + 1}")
            if stop.wait(delay):
                raise RetryError(reason, number) from error
    raise AssertionError("unreachable")
