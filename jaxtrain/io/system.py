"""CPU cores, time since the boot, and the lifetime of child processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies, and exits at once if the parent is already dead.

    The kernel does this on Linux only. Elsewhere a child notices a dead parent by its closed pipes.

    Args:
      parent: process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


@contextlib.contextmanager
def kept_handler(number: int) -> Iterator[None]:
    """Leaves the handler of a signal as it was before the block: that of a library in C, too, unlike `signal`."""
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(1024)  # more than any system's `struct sigaction`
    libc.sigaction(number, None, before)
    try:
        yield
    finally:
        libc.sigaction(number, before, None)


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot_time() -> float:
    """Returns seconds of a clock that nobody sets, and that goes on while the machine is suspended, if it has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def boot_id() -> str:
    """Returns a name of this machine since its boot, within which `boot_time` can be compared; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
