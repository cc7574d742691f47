"""Leader as a process of its own beside an agent, which starts it again when it ends or stops."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import IO

from jaxtrain.exit_codes import USAGE
from jaxtrain.launch.exit_reasons import describe_exit
from jaxtrain.launch.worker_logs import Terminal

END = signal.SIGUSR2  # asks a leader process to lead no more, once it has told its nodes that the job has ended
SIGN_OF_LIFE = ""  # line that a leader prints now and then
START_TIMEOUT = 20.0  # seconds until its first sign of life
MAX_STARTS = 5  # in a row without a sign of life
BACKOFF = 1.0  # seconds before a second start in a row, and more before each further one
READ_BYTES = 1 << 16


class LeaderProcess:
    """Leader process, or one that waits to lead. It dies with the thread that starts it. Main thread only."""

    def __init__(self, command: Sequence[str], settings: str, silence: float, terminal: Terminal) -> None:
        """Creates the process without starting it.

        Args:
            command: command line; the process reads its settings from stdin, and prints lines for the terminal.
            settings: what it reads.
            silence: seconds without a sign of life after which it is killed and started again.
            terminal: shows its lines.
        """
        self._command, self._settings, self._silence, self._terminal = list(command), settings, silence, terminal
        self._process: subprocess.Popen[bytes] | None = None
        self._selector: selectors.BaseSelector | None = None
        self._partial = {"out": b"", "err": b""}
        self._deadline, self._starts, self._start_time = 0.0, 0, 0.0
        self._has_worked = False

    def start(self, selector: selectors.BaseSelector) -> None:
        """Starts the process. `selector` calls the data of its keys when they are readable."""
        self._selector, self._starts = selector, self._starts + 1
        self._start_time = time.monotonic() + BACKOFF * self._starts  # of the next one, at the earliest
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # this machine has no process or memory to spare now
            self._terminal.show(f"launch  the leader cannot be started ({error.strerror}); trying again", error=True)
            self._process = None
            return
        self._process, self._deadline = process, time.monotonic() + START_TIMEOUT
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(self._settings.encode())
        for name, pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, lambda name=name, pipe=pipe: self._read(name, pipe))

    def check(self) -> int | None:
        """Starts an ended or stopped process again. Returns an exit code if that is of no use."""
        assert self._selector is not None
        if self._process is None:
            if time.monotonic() > self._start_time and self._starts < MAX_STARTS:
                self.start(self._selector)
            return 1 if self._process is None and self._starts >= MAX_STARTS else None
        code = self._process.poll()
        if code is None:
            for name, pipe in self._pipes():  # this agent itself may have been busy
                while not pipe.closed and self._read(name, pipe):
                    pass
            if time.monotonic() > self._deadline:
                self._terminal.show(f"launch  the leader gives no sign of life: {self._restart()}", error=True)
            return None
        self._close_pipes()
        if code == USAGE and not self._has_worked:
            return USAGE
        if self._starts >= MAX_STARTS:
            self._terminal.show(f"jaxtrain: launch: the leader {describe_exit(code)} {MAX_STARTS} times", error=True)
            return 1
        if time.monotonic() < self._start_time and self._starts > 1:
            return None
        self._terminal.show(f"launch  the leader {describe_exit(code)}: {self._restart()}", error=True)
        return None

    def end(self, timeout: float) -> None:
        """Ends the process. If it leads, it tells the other nodes first, for at most `timeout` seconds."""
        if self._process is None:
            return
        self._process.send_signal(END)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self._kill()
        self._close_pipes()

    def _restart(self) -> str:
        assert self._selector is not None
        self._kill()
        self._close_pipes()
        self.start(self._selector)
        return "starting it again"

    def _kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _pipes(self) -> list[tuple[str, IO[bytes]]]:
        process = self._process
        if process is None:
            return []
        return [(name, pipe) for name, pipe in (("out", process.stdout), ("err", process.stderr)) if pipe is not None]

    def _close_pipes(self) -> None:
        assert self._selector is not None
        for name, pipe in self._pipes():
            if pipe.closed:
                continue
            while self._read(name, pipe):
                pass
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            pipe.close()

    def _read(self, name: str, pipe: IO[bytes]) -> bool:
        """Shows the available lines of a pipe. Returns whether there may be more."""
        try:
            data = os.read(pipe.fileno(), READ_BYTES)
        except OSError:
            return False
        if not data:
            if self._selector is not None and pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            return False
        *lines, self._partial[name] = (self._partial[name] + data).split(b"\n")
        for line in lines:
            if line:
                self._terminal.show(line.decode(errors="replace"), error=name == "err")
            elif name == "out":
                self._deadline, self._starts, self._has_worked = time.monotonic() + self._silence, 0, True
        return True
