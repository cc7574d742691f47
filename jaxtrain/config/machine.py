"""What this process may use of its machine. No JAX."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores that this process may run on, or all of the machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
