"""Child process of an agent, in a session of its own, whose output is read without waiting. Linux and macOS."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

READ_BYTES = 1 << 16  # read at a time
DRAIN_TIMEOUT = 1.0  # seconds to read the remaining output of an ended process


class ChildProcess:
    """Running process. Ctrl-C in the terminal reaches it only through its agent."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, given: bytes = b"") -> None:
        """Starts the process. Raises OSError if that fails.

        Args:
            command: command line.
            env: environment; None: that of this process.
            given: what it reads from stdin, at most what a pipe holds.
        """
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self.pipes: dict[str, IO[bytes]] = {"out": self._process.stdout, "err": self._process.stderr}
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(given)

    def handle(self, stream: str, data: bytes) -> None:
        """Handles output of the stream `out` or `err`."""

    def read(self, stream: str) -> bytes | None:
        """Handles and returns the available output of a pipe: None if there is none yet, empty at its end."""
        try:
            data = os.read(self.pipes[stream].fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self.handle(stream, data)
        return data

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def wait(self, timeout: float) -> None:
        """Waits for the end of the process, at most `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def signal(self, number: int) -> None:
        """Sends a signal to the process, not to its child processes."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL to the process and its child processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Cleans up after an ended process: kills its child processes, reads the remaining output, closes the pipes."""
        self.kill()
        until = time.monotonic() + DRAIN_TIMEOUT
        for stream, pipe in self.pipes.items():
            while time.monotonic() < until and self.read(stream):
                pass
            pipe.close()
