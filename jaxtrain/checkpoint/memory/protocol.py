"""Messages between workers and snapshot servers, and the format of a snapshot.

A message is a frame of JSON, followed by frames of bytes if it says so. A snapshot is a header, which lists pieces of
tensors, and their bytes.
"""

from __future__ import annotations

import json
import mmap
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jaxtrain.checkpoint.files import TensorSpecs
from jaxtrain.errors import PeerMemoryError, ProtocolError, format_name
from jaxtrain.io.authenticated import Connection, Session

CHUNK = 1 << 20  # bytes sent at a time
MAX_MESSAGE = 16 << 20  # bytes of a message: a header lists every piece of a state
PURPOSE = "memory"  # of a connection, see `Session`
TIMEOUT = 20.0  # seconds of silence after which the other side is lost


class SnapshotKey(NamedTuple):
    """Key of a snapshot; `generation` is that of the launch that made it."""

    generation: int
    step: int
    process: int


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: its start and shape in elements, its offset and size in bytes, and the xxh3-64 as hex."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    size: int
    digest: str


@dataclass(frozen=True)
class SnapshotHeader:
    """Header of a snapshot.

    Attributes:
        processes: number of snapshots that make up the step.
        size: bytes of this snapshot.
        tensors: specs of all tensors of the state.
        pieces: pieces in this snapshot.
        manifest: manifest as in a checkpoint.
    """

    processes: int
    size: int
    tensors: TensorSpecs
    pieces: tuple[Piece, ...]
    manifest: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists."""
        return asdict(self)


def parse_header(data: Any) -> SnapshotHeader:
    """Returns the header of JSON data. Raises PeerMemoryError if it is malformed or names bytes out of range."""
    try:
        pieces = tuple(map(_parse_piece, data["pieces"]))
        tensors = {str(name): [list(_ints(shape)), str(dtype)] for name, (shape, dtype) in data["tensors"].items()}
        header = SnapshotHeader(int(data["processes"]), int(data["size"]), tensors, pieces, dict(data["manifest"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise PeerMemoryError("malformed snapshot header") from None
    for piece in pieces:
        if piece.name not in tensors or not 0 <= piece.offset <= piece.offset + piece.size <= header.size:
            raise PeerMemoryError(f"a snapshot header names bytes of {format_name(piece.name)} out of range")
    return header


def _parse_piece(data: Any) -> Piece:
    start, shape = _ints(data["start"]), _ints(data["shape"])
    return Piece(str(data["name"]), start, shape, int(data["offset"]), int(data["size"]), str(data["digest"]))


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def connect(connection: socket.socket, secret: str, is_server: bool) -> Connection:
    """Shakes hands over a connected socket. Raises OSError, and PeerMemoryError if the other side is a stranger."""
    connection.settimeout(TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with _protocol_errors():
        return Connection(connection, Session(secret, PURPOSE, is_server, MAX_MESSAGE))


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Sends a message. Raises OSError."""
    connection.send(json.dumps(message, separators=(",", ":")).encode())


def send_bytes(connection: Connection, data: Iterable[memoryview]) -> None:
    """Sends bytes. Raises OSError."""
    for view in data:
        for start in range(0, len(view), CHUNK):  # the socket's timeout applies to a whole `sendall`
            connection.send(view[start : start + CHUNK])


def receive(connection: Connection) -> dict[str, Any] | None:
    """Returns the next message; None at the end. Raises OSError, and PeerMemoryError for a malformed one."""
    with _protocol_errors():
        payload = connection.receive()
    if payload is None:
        return None
    try:
        message = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise PeerMemoryError("malformed message")
    return message


def receive_bytes(connection: Connection, size: int) -> memoryview:
    """Returns `size` bytes. Raises OSError, and PeerMemoryError if the stream ends before."""
    # mmap zeroes its pages as they are filled; a bytearray would be zeroed first, while the sender waits.
    view, done = memoryview(mmap.mmap(-1, max(size, 1)))[:size], 0
    while done < size:
        with _protocol_errors():
            payload = connection.receive()
        if not payload or len(payload) > size - done:
            raise PeerMemoryError(f"the connection ended after {done} of {size} bytes")
        view[done : done + len(payload)] = payload
        done += len(payload)
    return view


@contextmanager
def _protocol_errors() -> Iterator[None]:
    """Raises PeerMemoryError in place of ProtocolError."""
    try:
        yield
    except ProtocolError as error:
        raise PeerMemoryError(str(error)) from None
