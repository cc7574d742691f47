"""How workers and stocks speak: a JSON object a line, and bytes after it where the line says so. No JAX."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any, BinaryIO

from jaxtrain.peers.part import PeerError

LINE = 16 << 20  # bytes of a line: a header names every piece of a state
PATIENCE = 5.0  # seconds without a byte until the other side is lost


def send(connection: socket.socket, message: dict[str, Any], data: Iterable[memoryview] = ()) -> None:
    """A line and bytes. Raises OSError."""
    connection.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    for piece in data:
        connection.sendall(piece)


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """The next line; None at the end. Raises OSError, and PeerError where it is no message."""
    line = stream.readline(LINE)
    if not line:
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise PeerError("what came is no message")
    return message


def receive_bytes(stream: BinaryIO, size: int) -> bytearray:
    """So many bytes. Raises OSError, and PeerError where the stream ends before."""
    data, at = bytearray(size), 0
    view = memoryview(data)
    while at < size:
        count = stream.readinto(view[at:])  # type: ignore[attr-defined]
        if not count:
            raise PeerError(f"the connection ended after {at} of {size} bytes")
        at += count
    return data
