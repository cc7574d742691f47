"""What workers print: everything into a file each, and on the terminal one log of what matters.

Process 0 speaks for the run, as it is the only one with a screen. Of the others warnings, errors and tracebacks are
shown, after `[RANK] `, and what several say alike only once.
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

# Of C++ libraries (`E0000 00:00:1700000000.000000 123 file.cc:1] ...`; gloo's threads write over each other), and a
# worker's advice on how to go on, which is the launcher's to give. They are in the files.
_LEFT_OUT = re.compile(
    r"^[IWE]\d{4} [\d:.]+\s+\d+ |^WARNING: All log messages before|\[Gloo\]|peer ranks|^next  jaxtrain resume "
    # what JAX's coordination service says, in many lines, when a peer is gone: the launcher says which
    r"|CoordinationService|^F\d{4} .*JAX distributed service|^The tasks have crashed|^:UNKNOWN:"
    r"|^\*\*\* Check failure stack|^\s+@\s+0x"
)
_TROUBLE = re.compile(
    r"^jaxtrain: |^F\d{4} |\b\w*(?:warning|error|exception)\b|\b(?:fatal|killed|terminate)\b", re.IGNORECASE
)
_TRACEBACK = "Traceback (most recent call last):"
_PROGRESS = re.compile(r"^step [\d,]+/[\d,]+  eta ")
_ERASE = "\r\033[2K"
_WAITING = 10_000  # lines that wait for a reader
_FLUSH = 2.0  # seconds that the last ones wait
_SHOWN = 1000  # lines of others that a generation shows; the rest is in the files


class Terminal:
    """Where lines of leader, agent and workers meet; each is written whole, by a thread of its own.

    Who reads them may stop reading (Ctrl-S, a pager): the supervisor must not stop with it, or its node would be taken
    for lost. What does not fit into the queue is left out; the files have it. On a terminal the progress line of the
    run stays the last one and is redrawn in place.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._progress = ""
        self._is_live = sys.stdout.isatty()
        self._lines: queue.Queue[tuple[str, bool] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes what is left, if somebody reads it."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_FLUSH)

    def begin(self) -> None:
        """A new generation: what was said may be said again."""
        self._seen.clear()

    def show(self, line: str, *, error: bool = False) -> None:
        """Shows a line."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((line, error))

    def other(self, rank: int, line: str) -> None:
        """Shows a line of another process than 0, unless one like it was shown."""
        if line not in self._seen and len(self._seen) < _SHOWN:
            self._seen.add(line)
            self.show(f"[{rank}] {line}", error=True)

    def _write(self) -> None:
        while (item := self._lines.get()) is not None:
            # Nobody may be there any more; the run goes on.
            with contextlib.suppress(OSError, ValueError):
                self._show(*item)
        if self._progress:
            with contextlib.suppress(OSError, ValueError):
                print(flush=True)

    def _show(self, line: str, error: bool) -> None:
        stream = sys.stderr if error else sys.stdout
        if not self._is_live:
            print(line, file=stream, flush=True)
            return
        print(_ERASE, end="", flush=True)
        if _PROGRESS.match(line):
            self._progress = line[: max(1, shutil.get_terminal_size().columns - 1)]
        else:
            print(line, file=stream, flush=True)
        print(self._progress, end="", flush=True)


class Log:
    """The output of one worker: bytes as they come into its file, lines that matter onto the terminal."""

    def __init__(self, path: Path, rank: int, terminal: Terminal) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._rank, self._terminal = rank, terminal
        self._rest = {"out": b"", "err": b""}
        self._in_traceback = False
        self.is_quiet = False

    def add(self, stream: str, data: bytes) -> None:
        """Takes what came from `out` or `err`."""
        with contextlib.suppress(OSError):  # a full disk: the terminal still has what matters
            os.write(self._file, data)
        *lines, self._rest[stream] = (self._rest[stream] + data).split(b"\n")
        for line in lines:
            self._show(stream, line.decode(errors="replace").rstrip("\r"))

    def close(self) -> None:
        """Shows a last line without end, and closes the file."""
        for stream, rest in self._rest.items():
            if rest:
                self._show(stream, rest.decode(errors="replace"))
        os.close(self._file)

    def _show(self, stream: str, line: str) -> None:
        is_nothing = stream == "err" and (not line or line.isdecimal())
        if self.is_quiet or is_nothing or _LEFT_OUT.search(line):
            return
        if self._rank == 0:
            self._terminal.show(line, error=stream == "err")
        elif self._matters(line):
            self._terminal.other(self._rank, line)

    def _matters(self, line: str) -> bool:
        """A traceback goes from its first line to the first that is not indented, which names the exception."""
        if line.startswith(_TRACEBACK):
            self._in_traceback = True
            return True
        if self._in_traceback:
            self._in_traceback = line.startswith((" ", "\t")) or not line
            return True
        return _TROUBLE.search(line) is not None
