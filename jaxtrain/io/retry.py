"""Trying again, a bounded number of times, with longer and longer pauses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

WAITS = (1.0, 5.0, 20.0, 60.0)  # seconds before the second try, the third, ...
T = TypeVar("T")


class GivenUp(Exception):
    """Every try failed, or a pause was cut short. `reason`: why the last one failed; `tries`: how many there were."""

    def __init__(self, reason: str, tries: int) -> None:
        super().__init__(reason)
        self.reason, self.tries = reason, tries


def persist(
    attempt: Callable[[], T],
    waits: Sequence[float],
    stop: threading.Event,
    failed: Callable[[Exception], str],
    again: Callable[[str, float, str], object],
) -> T:
    """Returns the result of `attempt`, after at most `len(waits) + 1` tries.

    Args:
      waits: seconds between tries.
      stop: set when no further try is wanted; a try under way is not disturbed.
      failed: tidies up after a try and says in one line why it failed.
      again: told (reason, seconds until the next try, "2 of 5") before a pause.

    Raises:
      GivenUp: the last try failed, or `stop` was set.
    """
    for number, wait in enumerate((*waits, None), start=1):
        try:
            return attempt()
        except Exception as error:  # storage and its libraries raise what they like
            reason = failed(error)
            if wait is None or stop.is_set():
                raise GivenUp(reason, number) from error
            again(reason, wait, f"{number + 1} of {len(waits) + 1}")
            if stop.wait(wait):
                raise GivenUp(reason, number) from error
    raise AssertionError("unreachable")
