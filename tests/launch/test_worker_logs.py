"""Terminal: all lines of process 0, only problems of the others; the files have everything."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from jaxtrain.launch.worker_logs import Terminal, WorkerLog

TRACE = b"""Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: no
after
"""


def test_process_0_passes_through_and_others_only_in_trouble(tmp_path, capsys):
    terminal = Terminal()
    first, second = WorkerLog(tmp_path / "0.log", 0, terminal), WorkerLog(tmp_path / "1.log", 1, terminal)
    first.add("out", b"step 1/2  lo")
    first.add("out", b"ss 3\nnext  jaxtrain resume runs/a\nlast")
    first.add("err", b"E0000 00:00:1700000000.000000 12 a.cc:1] noise\nsaid\n")
    second.add("out", b"[Gloo] Rank 1 is connected to 1 peer ranks\nquiet\nUserWarning: odd\n")
    second.add("err", TRACE)
    first.close()
    second.close()
    terminal.close()
    shown = capsys.readouterr()
    assert shown.out == "step 1/2  loss 3\nlast\n"
    assert shown.err.splitlines() == [
        "said", "[1] UserWarning: odd", *(f"[1] {line}" for line in TRACE.decode().splitlines()[:4])
    ]  # fmt: skip
    assert (tmp_path / "1.log").read_bytes().endswith(TRACE)
    assert b"jaxtrain resume" in (tmp_path / "0.log").read_bytes()


@pytest.mark.parametrize(
    ("line", "is_ended_by_jax"),
    [
        (
            b"F1125 12:52:05.530118   20961 client.h:80] Terminating process because the JAX distributed service det",
            True,
        ),
        (b"F1125 12:08:11.856424   16574 named_sharding.cc:60] Check failed: VerifyNamedSharding(*this) is OK", False),
    ],
)
def test_who_aborts_says_whether_jax_ended_it_for_another(line, is_ended_by_jax, tmp_path, capsys):
    terminal = Terminal()
    log = WorkerLog(tmp_path / "1.log", 1, terminal)
    log.add("err", line[:40])
    log.add("err", line[40:])  # the process ends before its line does
    log.close()
    terminal.close()
    assert log.is_ended_by_jax == is_ended_by_jax
    assert ("Check failed" in capsys.readouterr().err) is not is_ended_by_jax


def test_what_several_say_alike_is_shown_once(tmp_path, capsys):
    terminal = Terminal()
    logs = [WorkerLog(tmp_path / f"{rank}.log", rank, terminal) for rank in (1, 2)]
    for log in logs:
        log.add("err", b"jaxtrain: mesh: does not fit\n")
    terminal.start_generation()
    logs[1].add("err", b"jaxtrain: mesh: does not fit\n")
    logs[1].is_quiet = True
    logs[1].add("err", b"jaxtrain: another\n")
    terminal.close()
    assert capsys.readouterr().err == "[1] jaxtrain: mesh: does not fit\n[2] jaxtrain: mesh: does not fit\n"


TERMINAL = """
import os, sys
from jaxtrain.launch.worker_logs import Terminal
terminal = Terminal()
for line in ("run   here", "step 1/9  eta 0:09  loss 3", "step 3  save  size 1", "step 4/9  eta 0:05  loss 2"):
    terminal.show(line)
terminal.close()
"""


def test_on_a_terminal_the_progress_line_stays_last_and_is_redrawn():
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", TERMINAL], stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    drawn = b""
    with contextlib.suppress(OSError):  # how Linux says that nobody is there any more
        while data := os.read(master, 4096):
            drawn += data
    os.close(master)
    assert process.wait(30) == 0
    lines = [line.rpartition("\r\033[2K")[2].strip() for line in drawn.decode().split("\n")]
    assert lines == ["run   here", "step 3  save  size 1", "step 4/9  eta 0:05  loss 2", ""]
    assert drawn.count(b"step 1/9") == 2


UNREAD = """
import os
from jaxtrain.launch.worker_logs import Terminal
terminal = Terminal()
for _ in range(20_000):
    terminal.show("x" * 100)
terminal.close()
os._exit(7)
"""


def test_a_reader_that_does_not_read_stops_nobody():
    process = subprocess.Popen([sys.executable, "-c", UNREAD], stdout=subprocess.PIPE)
    assert process.wait(30) == 7
    assert process.stdout is not None
    process.stdout.close()
