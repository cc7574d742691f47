"""Handlers of signals that a library would replace."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

from jaxtrain.io.system import kept_handler

IGNORE = 1  # SIG_IGN


def _fail_after_a_change() -> None:
    with kept_handler(signal.SIGUSR2):
        ctypes.CDLL(None).signal(ctypes.c_int(signal.SIGUSR2), ctypes.c_void_p(IGNORE))
        os.kill(os.getpid(), signal.SIGUSR2)
        raise KeyError


def test_a_handler_is_kept_that_c_code_replaces() -> None:
    """As Ray does; `signal.signal` would not notice."""
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: caught.append(number))
    try:
        with pytest.raises(KeyError):
            _fail_after_a_change()
        assert caught == []
        os.kill(os.getpid(), signal.SIGUSR2)
        assert caught == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
