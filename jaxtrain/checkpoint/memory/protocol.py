"""Protocol of workers and memory servers: a JSON object a line, and bytes after it where the line says so."""

from __future__ import annotations

import json
import mmap
import socket
from collections.abc import Iterable
from io import BufferedIOBase
from typing import Any

from jaxtrain.errors import PeerMemoryError

CHUNK = 4 << 20  # bytes sent at a time
LINE = 16 << 20  # bytes of a line: a header names every piece of a state
PATIENCE = 20.0  # seconds without a byte until the other side is lost


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """A line. Raises OSError."""
    connection.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def send_bytes(connection: socket.socket, data: Iterable[memoryview]) -> None:
    """Bytes. Raises OSError."""
    for piece in data:
        for at in range(0, len(piece), CHUNK):  # a socket's timeout is of the whole `sendall`
            connection.sendall(piece[at : at + CHUNK])


def receive(stream: BufferedIOBase) -> dict[str, Any] | None:
    """The next line; None at the end. Raises OSError, and PeerMemoryError where it is no message."""
    line = stream.readline(LINE)
    if not line:
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise PeerMemoryError("what came is no message")
    return message


def receive_bytes(stream: BufferedIOBase, size: int) -> memoryview:
    """Receives this many bytes. Raises OSError, and PeerMemoryError where the stream ends before."""
    # Pages come as they are filled: a bytearray would be zeroed first, while the sender waits.
    view, at = memoryview(mmap.mmap(-1, max(size, 1)))[:size], 0
    while at < size:
        count = stream.readinto(view[at:])
        if not count:
            raise PeerMemoryError(f"the connection ended after {at} of {size} bytes")
        at += count
    return view
