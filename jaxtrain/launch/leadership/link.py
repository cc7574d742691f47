"""Connection of an agent to its leader: a thread finds it, connects and authenticates, and does so after each loss."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from jaxtrain.errors import ProtocolError
from jaxtrain.launch.protocol import Channel, ConnectionClosed

CONNECT_RETRY = 0.5  # seconds between attempts to reach the leader
NO_ANSWER = "no answer yet"

Address = tuple[str, int]


class LeaderFinder(Protocol):
    """Finds the leader.

    Attributes:
        is_fenced: saves of workers that a leader has given up do not count, so that an agent without a leader need not
            end its workers at once.
    """

    @property
    def is_fenced(self) -> bool: ...

    def find(self) -> Address:
        """Returns the leader's address. Raises OSError if nobody leads or that cannot be known."""
        ...

    def newest_generation(self) -> int:
        """Returns the number of the newest generation; 0 if that cannot be known."""
        ...


class FixedLeader:
    """Finder of a leader that is always at one address."""

    is_fenced = False

    def __init__(self, address: Address) -> None:
        self._address = address

    def find(self) -> Address:
        """Returns the address."""
        return self._address

    def newest_generation(self) -> int:
        """Returns 0."""
        return 0


class LeaderLink:
    """Opens the connection of an agent to its leader in the background.

    Attributes:
        problem: why the last attempt failed.
        refused_time: `time.monotonic()` when the leader's machine last said that nobody listens there: no leader lives.
        newest_generation: number of the newest generation at the last attempt, if known.
        secret: secret of the open connection.
    """

    def __init__(self, finder: LeaderFinder, read_secret: Callable[[], str], timeout: float) -> None:
        """Creates the link.

        Args:
            finder: finds the leader.
            read_secret: returns the secret of the job; called for every connection, because a leader may be new.
            timeout: seconds for the leader to accept a connection, and for each of its answers until it is open.
        """
        self.finder, self._read_secret, self._timeout = finder, read_secret, timeout
        self.problem, self.refused_time, self.newest_generation, self.secret = NO_ANSWER, 0.0, 0, ""
        self._channel: Channel | None = None
        self._receiver, self._sender = socket.socketpair()
        self._closed, self._is_first = threading.Event(), True

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when a connection is open, for selectors."""
        return self._receiver.fileno()

    def open(self) -> None:
        """Starts to look for the leader; no connection may be open or being opened."""
        wait, self._is_first = 0.0 if self._is_first else CONNECT_RETRY, False
        threading.Thread(target=self._connect, args=(wait,), name="leader-link", daemon=True).start()

    def take(self) -> Channel | None:
        """Returns the open connection once; None if there is none."""
        with contextlib.suppress(BlockingIOError):
            self._receiver.setblocking(False)
            self._receiver.recv(64)
        channel, self._channel = self._channel, None
        return channel

    def close(self) -> None:
        """Stops looking."""
        self._closed.set()
        self._receiver.close()

    def _connect(self, wait: float) -> None:
        while not self._closed.wait(wait):
            wait = CONNECT_RETRY
            try:
                self._channel = self._open_once()
                self.problem = NO_ANSWER
            except ConnectionRefusedError as error:
                self.refused_time, self.problem = time.monotonic(), error.strerror
            except (OSError, ProtocolError) as error:
                self.problem = str(getattr(error, "strerror", None) or error)
            else:
                with contextlib.suppress(OSError):
                    self._sender.send(b"1")
                return
            self.newest_generation = self.finder.newest_generation()

    def _open_once(self) -> Channel:
        connection = socket.create_connection(self.finder.find(), timeout=self._timeout)
        try:
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError(111, "Connection refused")  # before a leader listens, TCP may find itself
            secret = self._read_secret()
            channel = Channel(connection, secret, is_server=False)
            channel.authenticate(self._timeout)
        except (OSError, ConnectionClosed, ProtocolError):
            connection.close()
            raise
        self.secret = secret
        return channel
