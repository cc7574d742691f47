"""Agreement between the processes of a run. With a single process every function is the identity.

Main thread only: these are device collectives, which all processes must issue in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

MAX_BYTES = 512  # of a message


def broadcast(value: int) -> int:
    """Returns process 0's `value` (int32) on every process; also a barrier."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def barrier() -> None:
    """Waits until every process is here."""
    broadcast(0)


def first_message(text: str | None) -> str | None:
    """Returns the first non-empty text of any process (its first 512 bytes) on every process, or None."""
    if jax.process_count() == 1:
        return text or None
    padded = np.zeros(MAX_BYTES, np.uint8)
    encoded = np.frombuffer((text or "").encode()[:MAX_BYTES], np.uint8)
    padded[: encoded.size] = encoded
    rows = np.asarray(multihost_utils.process_allgather(padded))
    messages = (bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows)
    return next(filter(None, messages), None)


def is_same(digest: Callable[[], bytes]) -> bool:
    """Returns whether all processes compute the same digest, of one length. A single process does not compute it."""
    if jax.process_count() == 1:
        return True
    rows = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest(), np.uint8)))
    return bool((rows == rows[0]).all())


def gather_bytes(value: bytes) -> list[bytes]:
    """Returns the bytes of every process, of one length, by process."""
    if jax.process_count() == 1:
        return [value]
    return [bytes(row) for row in np.asarray(multihost_utils.process_allgather(np.frombuffer(value, np.uint8)))]
