"""Agreement between the processes of a run. All of it is the identity in a single process.

Main thread only: these are device collectives, which every process must issue in the same order.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

_TEXT = 512  # bytes of a message that travel between processes


def agreed(value: int) -> int:
    """Process 0's `value` (int32), on every process; also a barrier."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def first_text(text: str | None) -> str | None:
    """The first non-empty text of any process (its first 512 bytes), on every process."""
    if jax.process_count() == 1:
        return text or None
    raw = np.zeros(_TEXT, np.uint8)
    encoded = np.frombuffer((text or "").encode()[:_TEXT], np.uint8)
    raw[: encoded.size] = encoded
    rows = np.asarray(multihost_utils.process_allgather(raw))
    texts = (bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows)
    return next((found for found in texts if found), None)
