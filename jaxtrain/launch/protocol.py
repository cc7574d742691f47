"""What leader and agents say to each other: one JSON object a line, of known kinds and fields, bounded in length."""

from __future__ import annotations

import json
import socket
from typing import Any

from jaxtrain.errors import ProtocolError, clean

LIMIT = 1 << 16  # bytes of a message
PATIENCE = 5.0  # seconds that a peer may take to read what is sent to it
VERSION = 2

Message = dict[str, Any]

# kind -> fields and their types; `[int]` is a list of them.
KINDS: dict[str, dict[str, Any]] = {
    # from an agent
    # memory: port of its stock of states, 0 for none
    "join": {"version": int, "node": int, "slots": int, "host": str, "port": int, "memory": int},
    "exit": {"generation": int, "rank": int, "pid": int, "code": int},  # code: negative for a signal
    # no worker is left; the port is free for the next coordinator; kept: newest step in its stock, -1 for none
    "idle": {"generation": int, "port": int, "kept": int},
    "signal": {"number": int, "again": bool},  # again: the second one, which ends everything
    # from either
    "beat": {},
    # from the leader
    "start": {
        "generation": int, "run": str, "address": str, "count": int, "devices": int, "simulated": bool,
        "slots": [int], "ranks": [int],
        "memory": int, "token": str, "stocks": [str],  # steps between copies; where to: the node's own comes first
    },
    "stop": {"generation": int},  # SIGTERM: save and exit
    "kill": {"generation": int},  # SIGKILL
    "end": {"code": int, "text": str},
}  # fmt: skip


class Closed(ConnectionError):
    """The other side is gone."""


def encode(kind: str, **fields: Any) -> bytes:
    """A message as a line. Raises ProtocolError where it is not one of `KINDS` or too long."""
    message = {"kind": kind, **fields}
    _check(message)
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > LIMIT:
        raise ProtocolError(f"a message of {len(line)} bytes; at most {LIMIT} are sent")
    return line


def decode(line: bytes) -> Message:
    """The message of a line. Raises ProtocolError where it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not JSON: {clean(repr(line[:40]))}") from None
    if not isinstance(message, dict):
        raise ProtocolError("not an object")
    _check(message)
    return message


def _check(message: Message) -> None:
    kind = message.get("kind")
    fields = KINDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"unknown kind {clean(repr(kind)[:40])}")
    if message.keys() != {"kind", *fields}:
        raise ProtocolError(f"{kind}: expected the fields {', '.join(fields) or 'none'}")
    for name, expected in fields.items():
        if not _is_a(message[name], expected):
            raise ProtocolError(f"{kind}: {name} has another type")


def _is_a(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(value, list) and all(_is_a(item, expected[0]) for item in value)
    return type(value) is expected  # a bool is no int here


class Channel:
    """A connected socket that speaks messages. One thread uses it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._buffer = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message. Raises Closed where nobody takes it."""
        try:
            self.socket.sendall(encode(kind, **fields))
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self) -> list[Message]:
        """The messages that have come, when a selector says that something has.

        Raises:
            Closed: the other side is gone.
            ProtocolError: what came is no message.
        """
        try:
            data = self.socket.recv(LIMIT)
        except OSError as error:
            raise Closed(str(error)) from None
        if not data:
            raise Closed("connection closed")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) >= LIMIT or any(len(line) >= LIMIT for line in lines):
            raise ProtocolError(f"a message of more than {LIMIT} bytes")
        return [decode(line) for line in lines]

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()
