"""SIGTERM and SIGINT become a request that the loop answers between two steps. No JAX at import.

The loop saves and exits with `SAVED`: 75 is EX_TEMPFAIL of sysexits.h, "try again later", so that a scheduler or
a shell loop can tell "saved, resume me" from success (0), an error (1, 2) and a run killed unsaved (128 + signal).
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Notes SIGTERM and SIGINT while it is entered; the second one ends the process at once, with 128 + signal.

        with Signals() as signals:
            for step in ...:
                if name := signals.stop_at(step): save, break

    Previous handlers come back on exit. Outside the main thread Python allows no handlers: then nothing is installed.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._requested: str | None = None
        self._distributed = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._distributed = _distributed()
            # With jax.distributed SIGTERM belongs to its preemption service, which tells the other processes.
            taken = (signal.SIGINT,) if self._distributed else (signal.SIGTERM, signal.SIGINT)
            for number in taken:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    @property
    def requested(self) -> str | None:
        """Name of the signal this process received ("SIGTERM"), or None."""
        return self._requested

    def stop_at(self, step: int) -> str | None:
        """Name of the signal after which all processes stop at this very step, or None. Every process asks each step.

        One process: the same as `requested`. Several: JAX's preemption service picks one step for all (20 us a call).
        """
        if not self._distributed:
            return self._requested
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            return self._requested or "SIGTERM"
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._requested is not None:
            os._exit(128 + number)
        self._requested = signal.Signals(number).name
        os.write(2, f"\n{self._requested}: saving after this step; once more to quit at once\n".encode())
        if self._distributed:
            os.kill(os.getpid(), signal.SIGTERM)  # hands the request to the preemption service


def _distributed() -> bool:
    import sys

    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized() and jax.process_count() > 1
