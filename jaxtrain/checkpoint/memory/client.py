"""A worker's way to the memory of the nodes: where it is, and a connection to one of them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from jaxtrain.checkpoint.memory.format import Header, Key, read_header
from jaxtrain.checkpoint.memory.protocol import PATIENCE, receive, receive_bytes, send, send_bytes
from jaxtrain.errors import PeerMemoryError

VARIABLE = "JAXTRAIN_PEERS"

Address = tuple[str, int]


@dataclass(frozen=True)
class Nodes:
    """Addresses of the memory servers of a job.

    Args:
        every: steps between copies.
        generation: of the launch; parts of different ones are never mixed.
        token: what they want to hear.
        stocks: (host, port) of each, this node's first and then the one that has a second copy of what is there.
    """

    every: int
    generation: int
    token: str
    stocks: tuple[Address, ...]

    def as_text(self) -> str:
        """Encodes the addresses for the environment of a worker."""
        return json.dumps(asdict(self))


def nodes(environ: Mapping[str, str] = os.environ) -> Nodes | None:
    """Reads the addresses from the environment; None if no agent keeps states."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    found = json.loads(text)
    return Nodes(**found | {"stocks": tuple((host, port) for host, port in found["stocks"])})


class Client:
    """A connection to one node's stock. Everything raises PeerMemoryError where the node is gone or has no such
    part."""

    def __init__(self, address: Address, token: str) -> None:
        self._token, self._where = token, f"the memory of {address[0]}:{address[1]}"
        try:
            self._socket = socket.create_connection(address, timeout=PATIENCE)
        except OSError as error:
            raise self._lost(error) from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stream.close()
        self._socket.close()

    def put(self, key: Key, header: Header, data: Iterable[memoryview]) -> None:
        """Gives a part away."""
        self._ask({"do": "put", "key": key, "header": header.as_json()})
        try:
            send_bytes(self._socket, data)
        except OSError as error:
            raise self._lost(error) from None
        self._reply()

    def parts(self) -> list[tuple[Key, int]]:
        """Lists the stored parts: keys, and how many processes a step of theirs has."""
        try:
            return [(Key(*map(int, key)), int(count)) for key, count in self._ask({"do": "list"})["parts"]]
        except (KeyError, TypeError, ValueError):
            raise PeerMemoryError(f"{self._where} answers in another language") from None

    def header(self, key: Key) -> Header:
        """Reads the header of a part."""
        return read_header(self._ask({"do": "header", "key": key}).get("header"))

    def read(self, key: Key, offset: int, size: int) -> memoryview:
        """Bytes of a part."""
        self._ask({"do": "read", "key": key, "offset": offset, "size": size})
        try:
            return receive_bytes(self._stream, size)
        except OSError as error:
            raise self._lost(error) from None

    def forget(self, after: int) -> None:
        """Later steps never happened."""
        self._ask({"do": "forget", "after": after})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            send(self._socket, {"token": self._token, **request})
        except OSError as error:
            raise self._lost(error) from None
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        try:
            reply = receive(self._stream)
        except OSError as error:
            raise self._lost(error) from None
        if reply is None:
            raise PeerMemoryError(f"{self._where} closed the connection")
        if "error" in reply:
            raise PeerMemoryError(f"{self._where}: {reply['error']}")
        return reply

    def _lost(self, error: OSError) -> PeerMemoryError:
        return PeerMemoryError(f"{self._where} is not reached ({error.strerror or error})")
