"""Signals that reach an agent: those of a closed terminal count once."""

from __future__ import annotations

from signal import SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1

import pytest

from jaxtrain.launch.agent import ReceivedSignals


@pytest.mark.parametrize(
    ("received", "stops"),
    [
        ([SIGTERM, SIGTERM], [SIGTERM, SIGTERM]),
        ([SIGINT, SIGTERM], [SIGINT, SIGTERM]),
        ([SIGHUP, SIGHUP], [SIGHUP]),
        ([SIGHUP, SIGCHLD], [SIGHUP]),
        ([SIGHUP, SIGTERM, SIGHUP], [SIGTERM]),
        ([SIGHUP, SIGTERM, SIGTERM], [SIGTERM, SIGTERM]),
        ([SIGTERM, SIGHUP], [SIGTERM]),
        ([SIGUSR1, SIGCHLD], []),
    ],
)
def test_repeated_signals(received: list[int], stops: list[int]):
    signals = ReceivedSignals()
    for number in received:
        signals.record(number)
    assert signals.stops == stops
    assert signals.is_save_requested == (SIGUSR1 in received)
