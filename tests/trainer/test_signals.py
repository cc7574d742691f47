"""Signals become requests; the second one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxtrain.exit_codes import SAVED
from jaxtrain.trainer.requests import Requests
from jaxtrain.trainer.signals import Signals

LOOP = """
import sys, time
from jaxtrain.exit_codes import SAVED
from jaxtrain.trainer.signals import Signals
with Signals() as signals:
    print("ready", flush=True)
    for step in range(400):
        time.sleep(0.02)
        if signals.stop_at(step):
            print("stopping", signals.requested, flush=True)
            if sys.argv[1:] == ["stubborn"]:
                time.sleep(20)
            sys.exit(SAVED)
"""


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_is_noted_and_handlers_come_back(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.requested is None
        assert signals.stop_at(0) is None
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 5
        while signals.requested is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert signals.requested == name
        assert signals.stop_at(1) == name
    assert signal.getsignal(number) is before


def test_a_request_to_save_is_met_once_and_stops_nothing():
    before = signal.getsignal(signal.SIGUSR1)
    requests = Requests()
    with Signals(requests) as signals:
        assert not requests.due(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while not requests.due(1) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert time.monotonic() < deadline
        assert not requests.due(2)
        assert signals.stop_at(2) is None
    assert signal.getsignal(signal.SIGUSR1) is before


def start(*args: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", LOOP, *args], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_loop_stops_with_its_own_exit_code():
    process = start()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == "stopping SIGTERM\n"
    assert process.returncode == SAVED == 75


@pytest.mark.measures
def test_the_second_signal_ends_the_process_at_once():
    process = start("stubborn")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopping SIGINT\n"
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert time.monotonic() - begun < 5
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.usefixtures("default_hangup")
def test_a_closed_terminal_sends_more_than_one_signal():
    """SIGHUP twice, then SIGTERM: the loop still stops by itself."""
    process = start("stubborn")
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "stopping SIGHUP\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


def test_an_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run():
        with Signals() as signals:
            seen.append((signals.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
