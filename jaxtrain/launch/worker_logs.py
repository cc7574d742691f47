"""Output of the workers: all of it to one file each, the relevant lines to the terminal.

Process 0 prints the progress of the run, so the terminal shows all its lines. Of the other processes it shows warnings,
errors and tracebacks after `[RANK] `, and identical lines only once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import sys
import threading
from pathlib import Path

# Lines that only the files have: messages of C++ libraries (`E0000 00:00:1700000000.000000 123 file.cc:1] ...`, some
# written over each other by gloo's threads), and a worker's own advice how to resume, which the launcher gives.
_HIDDEN = re.compile(
    r"^[IWE]\d{4} [\d:.]+\s+\d+ |^WARNING: All log messages before|\[Gloo\]|peer ranks|^next  jaxtrain resume "
    # many lines of JAX's coordination service about a lost peer, which the launcher names itself
    r"|CoordinationService|^The tasks have crashed|^:UNKNOWN:"
    r"|^\*\*\* Check failure stack|^\s+@\s+0x"
)
_PROBLEM = re.compile(
    r"^jaxtrain: |^F\d{4} |\b\w*(?:warning|error|exception)\b|\b(?:fatal|killed|terminate)\b", re.IGNORECASE
)
_ENDED_BY_JAX = re.compile(r"^F\d{4} .*JAX distributed service")  # because another process was lost
_TRACEBACK = "Traceback (most recent call last):"
_PROGRESS = re.compile(r"^step [\d,]+/[\d,]+  eta ")
_ERASE_LINE = "\r\033[2K"
_QUEUE_SIZE = 10_000  # lines that wait to be printed
_CLOSE_TIMEOUT = 2.0  # seconds to print the last lines
_MAX_SHOWN = 1000  # lines of other processes that a generation shows; the files have the rest


class Terminal:
    """Terminal that leader, agent and workers share. A thread of its own prints each line whole.

    The reader of the terminal may stop reading (Ctrl-S, a pager). The supervisor must not block then, or its node would
    be taken for lost: lines that do not fit into the queue are dropped; the files have them. On a terminal the progress
    line of the run stays the last line and is redrawn in place.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._progress = ""
        self._is_live = sys.stdout.isatty()
        self._lines: queue.Queue[tuple[str, bool] | None] = queue.Queue(_QUEUE_SIZE)
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Prints the lines in the queue, unless nobody reads them."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_CLOSE_TIMEOUT)

    def start_generation(self) -> None:
        """Lets lines of an earlier generation be shown again."""
        self._seen.clear()

    def show(self, line: str, *, error: bool = False) -> None:
        """Shows a line, on stderr if `error`."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((line, error))

    def show_once(self, rank: int, line: str) -> None:
        """Shows a line of a process other than 0, unless an identical one was shown in this generation."""
        if line not in self._seen and len(self._seen) < _MAX_SHOWN:
            self._seen.add(line)
            self.show(f"[{rank}] {line}", error=True)

    def _write(self) -> None:
        while (item := self._lines.get()) is not None:
            # The terminal may be gone; the run continues.
            with contextlib.suppress(OSError, ValueError):
                self._print(*item)
        if self._progress:
            with contextlib.suppress(OSError, ValueError):
                print(flush=True)

    def _print(self, line: str, error: bool) -> None:
        stream = sys.stderr if error else sys.stdout
        if not self._is_live:
            print(line, file=stream, flush=True)
            return
        print(_ERASE_LINE, end="", flush=True)
        if _PROGRESS.match(line):
            self._progress = line[: max(1, shutil.get_terminal_size().columns - 1)]
        else:
            print(line, file=stream, flush=True)
        print(self._progress, end="", flush=True)


class WorkerLog:
    """Output of one worker: raw bytes to its file, relevant lines to the terminal."""

    def __init__(self, path: Path, rank: int, terminal: Terminal) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._rank, self._terminal = rank, terminal
        self._partial = {"out": b"", "err": b""}  # last line of each stream, not ended yet
        self._in_traceback = False
        self.is_quiet = False
        self.is_ended_by_jax = False  # whether JAX said that it ends this process because another one was lost

    def add(self, stream: str, data: bytes) -> None:
        """Adds output of the stream `out` or `err`."""
        with contextlib.suppress(OSError):  # a full disk: the terminal still gets the relevant lines
            os.write(self._file, data)
        *lines, self._partial[stream] = (self._partial[stream] + data).split(b"\n")
        for line in lines:
            self._show(stream, line.decode(errors="replace").rstrip("\r"))

    def close(self) -> None:
        """Shows unfinished last lines and closes the file."""
        for stream, partial in self._partial.items():
            if partial:
                self._show(stream, partial.decode(errors="replace"))
        os.close(self._file)

    def _show(self, stream: str, line: str) -> None:
        is_empty = stream == "err" and (not line or line.isdecimal())
        is_ended_by_jax = _ENDED_BY_JAX.search(line) is not None
        self.is_ended_by_jax |= is_ended_by_jax
        if self.is_quiet or is_empty or is_ended_by_jax or _HIDDEN.search(line):
            return
        if self._rank == 0:
            self._terminal.show(line, error=stream == "err")
        elif self._is_problem(line):
            self._terminal.show_once(self._rank, line)

    def _is_problem(self, line: str) -> bool:
        """Returns whether the line is a warning, an error, or in a traceback.

        A traceback ends with the first line that is not indented, which names the exception.
        """
        if line.startswith(_TRACEBACK):
            self._in_traceback = True
            return True
        if self._in_traceback:
            self._in_traceback = line.startswith((" ", "\t")) or not line
            return True
        return _PROBLEM.search(line) is not None
