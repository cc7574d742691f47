"""SIGTERM, SIGINT, SIGHUP and SIGUSR1 as requests that the training loop handles between two steps.

After the first three the loop saves and exits with `SAVED`: 75 is EX_TEMPFAIL of sysexits.h, "try again later". So a
scheduler or a shell loop can distinguish a saved run from success (0), an error (1, 2) and a run killed without a save
(128 + signal). After SIGUSR1 it saves and goes on.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from jaxtrain.trainer.requests import Request, Requests


class Signals:
    """Records signals while the context is active. A second SIGTERM or SIGINT exits at once with 128 + signal.

    Not so SIGHUP: kernel and shell both send it when a terminal is closed, and service managers beside SIGTERM. It is
    left alone if the process has inherited it as ignored, as under nohup.

        with Signals() as signals:
            for step in ...:
                if name := signals.stop_at(step): save, break

    Restores previous handlers on exit. Does nothing outside the main thread, where Python allows no handlers.

    Args:
        requests: get a request to save from SIGUSR1.
    """

    def __init__(self, requests: Requests | None = None) -> None:
        self._requests = requests or Requests()
        self._previous: dict[signal.Signals, Any] = {}
        self._requested: str | None = None
        self._distributed = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._distributed = _distributed()
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._request_save)
            # With jax.distributed, its preemption service handles SIGTERM and informs the other processes.
            handled = [signal.SIGINT, *([] if self._distributed else [signal.SIGTERM])]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                handled.append(signal.SIGHUP)
            for number in handled:
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    @property
    def requested(self) -> str | None:
        """Name of the signal that this process received ("SIGTERM"), or None."""
        return self._requested

    def stop_at(self, step: int) -> str | None:
        """Returns the name of the signal for which all processes stop at this step, or None.

        Every process must call it each step. One process: the same as `requested`. Several: JAX's preemption service
        chooses one step for all (20 us a call).
        """
        if not self._distributed:
            return self._requested
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            return self._requested or "SIGTERM"
        return None

    def _request_save(self, number: int, frame: FrameType | None) -> None:
        self._requests.ask(Request("save", "SIGUSR1"))
        with suppress(OSError):
            os.write(2, b"\nSIGUSR1: saving after this step; training goes on\n")

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._requested is not None:
            return
        if self._requested not in (None, "SIGHUP"):
            os._exit(128 + number)
        self._requested = signal.Signals(number).name
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{self._requested}: saving after this step; send it again to quit at once\n".encode())
        if self._distributed:
            os.kill(os.getpid(), signal.SIGTERM)  # passes the request to the preemption service


def _distributed() -> bool:
    import sys

    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized() and jax.process_count() > 1
