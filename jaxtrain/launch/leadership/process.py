"""Leader as a process of its own beside an agent, which starts it again when it ends or stops."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from jaxtrain.exit_codes import USAGE
from jaxtrain.launch.child_process import ChildProcess
from jaxtrain.launch.exit_reasons import describe_exit
from jaxtrain.launch.worker_logs import Terminal

END = signal.SIGUSR2  # asks a leader process to lead no more, once it has told its nodes that the job has ended
SIGN_OF_LIFE = ""  # line that a leader prints now and then
START_TIMEOUT = 20.0  # seconds until its first sign of life
MAX_STARTS = 5  # in a row without a sign of life
BACKOFF = 1.0  # seconds before a second start in a row, and more before each further one
KILL_TIMEOUT = 5.0  # seconds until a killed process has ended


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
        self._child: _Child | None = None
        self._selector: selectors.BaseSelector | None = None
        self._deadline = self._next_start = 0.0
        self._starts, self._has_worked = 0, False

    def start(self, selector: selectors.BaseSelector) -> None:
        """Starts the process. `selector` calls the data of its keys when they are readable."""
        self._selector, self._starts, now = selector, self._starts + 1, time.monotonic()
        self._deadline, self._next_start = now + START_TIMEOUT, now + BACKOFF * self._starts
        try:
            self._child = _Child(self._command, self._settings, self._show)
        except OSError as error:  # this machine has no process or memory to spare now
            self._terminal.show(f"launch  the leader cannot be started ({error.strerror}); trying again", error=True)
            return
        for stream, pipe in self._child.pipes.items():
            selector.register(pipe, selectors.EVENT_READ, partial(self._read, self._child, stream))

    def check(self) -> int | None:
        """Starts an ended or stopped process again. Returns an exit code if that is of no use."""
        child, now = self._child, time.monotonic()
        code = None if child is None else child.poll()
        if child is not None and code is None:
            for stream in child.pipes:  # this agent itself may have been busy
                while child.read(stream):
                    pass
            if now > self._deadline:
                self._restart("gives no sign of life")
            return None
        self._close()
        if code == USAGE and not self._has_worked:
            return USAGE
        reason = "could not be started" if code is None else describe_exit(code)
        if self._starts >= MAX_STARTS:
            self._terminal.show(f"jaxtrain: launch: the leader {reason} {MAX_STARTS} times", error=True)
            return 1
        if self._starts <= 1 or now > self._next_start:
            self._restart(reason)
        return None

    def end(self, timeout: float) -> None:
        """Ends the process. If it leads, it tells the other nodes first, for at most `timeout` seconds."""
        if self._child is not None:
            self._child.signal(END)
            self._child.wait(timeout)
            self._close()

    def _restart(self, reason: str) -> None:
        assert self._selector is not None
        self._terminal.show(f"launch  the leader {reason}: starting it again", error=True)
        self._close()
        self.start(self._selector)

    def _close(self) -> None:
        """Kills the process, and shows its last lines."""
        child, self._child = self._child, None
        if child is None or self._selector is None:
            return
        for pipe in child.pipes.values():
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        child.close()
        child.wait(KILL_TIMEOUT)

    def _read(self, child: _Child, stream: str) -> None:
        """Reads a pipe that the selector reported as readable."""
        if child.read(stream) == b"" and self._selector is not None:
            self._selector.unregister(child.pipes[stream])

    def _show(self, stream: str, line: str) -> None:
        if line:
            self._terminal.show(line, error=stream == "err")
        elif stream == "out":
            self._deadline, self._starts, self._has_worked = time.monotonic() + self._silence, 0, True


class _Child(ChildProcess):
    """Process whose lines are shown."""

    def __init__(self, command: Sequence[str], settings: str, show: Callable[[str, str], None]) -> None:
        self._partial, self._show = {"out": b"", "err": b""}, show
        super().__init__(command, given=settings.encode())

    def handle(self, stream: str, data: bytes) -> None:
        *lines, self._partial[stream] = (self._partial[stream] + data).split(b"\n")
        for line in lines:
            self._show(stream, line.decode(errors="replace"))
