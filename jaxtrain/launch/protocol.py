"""Messages between leader and agents: one JSON object per line, with known kinds and fields and a limited length."""

from __future__ import annotations

import json
import socket
from typing import Any

from jaxtrain.errors import ProtocolError, escape_unprintable
from jaxtrain.io.authenticated import Session

MAX_BYTES = 1 << 20  # of a message: `start` names the memory servers of all nodes
READ_BYTES = 1 << 16  # read at a time
SEND_TIMEOUT = 5.0  # seconds until the other side must have read a message
VERSION = 4
PURPOSE = "launch"  # of a connection, see `Session`

Message = dict[str, Any]

# kind -> fields and their types; `[int]` is a list of int.
FROM_AGENT: dict[str, dict[str, Any]] = {
    # memory_port: port of its server of in-memory checkpoints, 0 for none
    # generation and ranks: the last one that was started here, 0 for none, and its workers that run
    "join": {
        "version": int, "node": int, "slots": int, "host": str, "port": int, "memory_port": int, "generation": int,
        "ranks": [int],
    },
    # code: negative for a signal; is_ended_by_jax: because another worker was lost
    "exit": {"generation": int, "rank": int, "pid": int, "code": int, "is_ended_by_jax": bool},
    # sent when no worker is left; port: free for the next JAX coordinator; memory_step: newest one in memory or -1
    "idle": {"generation": int, "port": int, "memory_step": int},
    "signal": {"number": int, "is_repeated": bool},  # a repeated signal ends everything at once
    "heartbeat": {},
}  # fmt: skip
FROM_LEADER: dict[str, dict[str, Any]] = {
    "start": {
        "generation": int, "run": str, "address": str, "processes": int, "devices_per_process": int,
        "is_simulated": bool, "slots": [int], "ranks": [int],
        "memory_every": int, "memory_addresses": [str],  # the node's own address comes first
        "fence": int,  # number with which the store compares the workers' saves, 0 without a store
    },
    "stop": {"generation": int},  # SIGTERM: save and exit
    "kill": {"generation": int},  # SIGKILL
    "end": {"code": int, "text": str},
    "alive": {},  # answer to a heartbeat
}  # fmt: skip
# revision: number of the leadership, which agents compare: a deposed leader's is smaller
KINDS = FROM_AGENT | {kind: fields | {"revision": int} for kind, fields in FROM_LEADER.items()}


class ConnectionClosed(ConnectionError):
    """The other side closed the connection."""


def encode(kind: str, **fields: Any) -> bytes:
    """Encodes a message. Raises ProtocolError if it is not one of `KINDS`, or too long."""
    message = {"kind": kind, **fields}
    _check(message)
    line = json.dumps(message, separators=(",", ":")).encode()
    if len(line) > MAX_BYTES:
        raise ProtocolError(f"{kind}: expected a message of at most {MAX_BYTES} bytes; found {len(line)}")
    return line


def decode(line: bytes) -> Message:
    """Decodes a message. Raises ProtocolError if it is not a message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not JSON: {escape_unprintable(repr(line[:40]))}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"expected a JSON object; found {escape_unprintable(repr(line[:40]))}")
    _check(message)
    return message


def _check(message: Message) -> None:
    kind = message.get("kind")
    fields = KINDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"unknown kind {escape_unprintable(repr(kind)[:40])}")
    if message.keys() != {"kind", *fields}:
        raise ProtocolError(f"{kind}: expected the fields {', '.join(fields) or 'none'}")
    for name, expected in fields.items():
        if not _has_type(message[name], expected):
            raise ProtocolError(f"{kind}: field {name} has the wrong type")


def _has_type(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(value, list) and all(_has_type(item, expected[0]) for item in value)
    return type(value) is expected  # isinstance would accept a bool as an int


def check_revision(message: Message, newest: int) -> int:
    """Returns the newest revision of a leadership that an agent knows of after a leader's message.

    Raises:
        ProtocolError: the message is of a leader that was deposed.
    """
    revision = message.get("revision", 0)
    if revision < newest:
        raise ProtocolError(f"its leadership {revision} has ended; the newest is {newest}")
    return revision


class Channel:
    """Connected socket that sends and receives messages once both sides have authenticated. Not thread-safe.

    Args:
        connection: socket that was connected or accepted.
        secret: secret of the job.
        is_server: whether it was accepted.
    """

    def __init__(self, connection: socket.socket, secret: str, is_server: bool) -> None:
        connection.settimeout(SEND_TIMEOUT)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._session = Session(secret, PURPOSE, is_server, MAX_BYTES)
        self._buffer = bytearray()

    @property
    def is_authenticated(self) -> bool:
        """True once the other side has proved that it knows the secret."""
        return self._session.is_authenticated

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for selectors."""
        return self.socket.fileno()

    def authenticate(self, timeout: float) -> None:
        """Shakes hands with the server, and waits for each of its answers at most `timeout` seconds.

        Raises as `receive` does.
        """
        self.socket.settimeout(timeout)
        self._send(self._session.outgoing())
        while not self.is_authenticated:
            self.receive()
        self.socket.settimeout(SEND_TIMEOUT)

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message. Raises ConnectionClosed if the other side does not read it."""
        self._send(b"".join(self._session.seal(encode(kind, **fields))))

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived. Call it when a selector reports data.

        Raises:
            ConnectionClosed: the other side closed the connection.
            ProtocolError: it does not know the secret, or the data are not a message.
        """
        try:
            data = self.socket.recv(READ_BYTES)
        except OSError as error:
            raise ConnectionClosed(str(error)) from None
        if not data:
            raise ConnectionClosed("connection closed")
        self._buffer += data
        messages = []
        while len(self._buffer) >= self._session.wanted:
            part = bytes(self._buffer[: self._session.wanted])
            del self._buffer[: len(part)]
            payload = self._session.take(part)
            if answer := self._session.outgoing():
                self._send(answer)
            if payload is not None:
                messages.append(decode(bytes(payload)))
        return messages

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()

    def _send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise ConnectionClosed(str(error)) from None
