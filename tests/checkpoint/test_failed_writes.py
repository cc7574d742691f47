"""A save that fails prints nothing of its own: its event is the report. Errors of others are printed as ever."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from jaxtrain.checkpoint import orbax

SCRIPT = """
import os, resource, signal, sys, threading
import jax.numpy as jnp
from jaxtrain.checkpoint import Checkpointer

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {f"w{index}": jnp.arange(4096.0) + index for index in range(60)}
with Checkpointer(sys.argv[1], waits=(0.1,)) as checkpoints:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    checkpoints.save(1, state, manifest={})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for event in checkpoints.poll():
        print(event, flush=True)

class Broken:
    def __del__(self):
        raise KeyError("of another")

Broken()
threading.Thread(target=lambda: 1 / 0).start()
"""


def test_a_full_disk_is_reported_once_a_try_and_nothing_else_is_printed(tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, env=os.environ, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "checkpoint 1 could not be written", "checkpoint 1 was not written in 2 tries"
    ]  # fmt: skip
    assert "OCDBT" not in done.stderr
    assert "Event loop is closed" not in done.stderr
    assert "KeyError: 'of another'" in done.stderr  # errors of others
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.count("Traceback") == 2, done.stderr


def test_an_event_loop_that_a_program_closed_is_reported():
    def call() -> None:
        loop = asyncio.new_event_loop()
        loop.close()
        loop.call_soon_threadsafe(print)

    passed: list[object] = []
    try:
        call()
    except RuntimeError as error:
        args = {"exc_type": type(error), "exc_value": error, "object": None}
        inner = error.__traceback__.tb_next.tb_next  # as from a thread without a frame of Python before asyncio's
        for trace in (error.__traceback__, inner):
            orbax._UnraisableHook(passed.append)(SimpleNamespace(**args, exc_traceback=trace))
    assert len(passed) == 1


def test_errors_of_other_tasks_are_logged():
    record = logging.LogRecord("asyncio", logging.ERROR, "base_events.py", 1, "never retrieved", (), None)
    assert orbax._is_no_failed_write(record)
    record.exc_info = (KeyError, KeyError("of another"), None)
    assert orbax._is_no_failed_write(record)
    record.exc_info = (ValueError, ValueError('RESOURCE_EXHAUSTED: Error writing "w" in OCDBT database'), None)
    assert not orbax._is_no_failed_write(record)
