"""Connection of a worker to a snapshot server, and the addresses of all servers."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from jaxtrain.checkpoint.memory import protocol
from jaxtrain.checkpoint.memory.protocol import SnapshotHeader, SnapshotKey
from jaxtrain.errors import PeerMemoryError

VARIABLE = "JAXTRAIN_PEERS"

Address = tuple[str, int]


@dataclass(frozen=True)
class PeerConfig:
    """Snapshot servers of a job, as the launcher describes them to a worker.

    Args:
        every: steps between snapshots.
        generation: generation of the launch; snapshots of different ones are never mixed.
        secret: secret of the job.
        servers: (host, port) of each server: this node's first, then the one that has the second copies.
    """

    every: int
    generation: int
    secret: str
    servers: tuple[Address, ...]

    def as_text(self) -> str:
        """Encodes the config for the environment variable `VARIABLE` of a worker."""
        return json.dumps(asdict(self))


def peer_config(environ: Mapping[str, str] = os.environ) -> PeerConfig | None:
    """Returns the config in the environment; None if the launcher offers no memory."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    fields = json.loads(text)
    return PeerConfig(**fields | {"servers": tuple((host, port) for host, port in fields["servers"])})


class SnapshotClient:
    """Connection to the server of a node. Every method raises PeerMemoryError if the node or the snapshot is gone."""

    def __init__(self, address: Address, secret: str) -> None:
        self._name = f"the memory of {address[0]}:{address[1]}"
        with self._network_errors():
            connection = socket.create_connection(address, timeout=protocol.TIMEOUT)
            try:
                self._connection = protocol.connect(connection, secret, is_server=False)
            except PeerMemoryError as error:
                connection.close()
                raise PeerMemoryError(f"{self._name}: {error}") from None

    def __enter__(self) -> SnapshotClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._connection.close()

    def put(self, key: SnapshotKey, header: SnapshotHeader, data: Iterable[memoryview]) -> None:
        """Stores a snapshot."""
        self._request({"do": "put", "key": key, "header": header.as_json()})
        with self._network_errors():
            protocol.send_bytes(self._connection, data)
        self._reply()

    def snapshots(self) -> list[tuple[SnapshotKey, int]]:
        """Lists the stored snapshots: (key, number of processes of its step)."""
        try:
            items = self._request({"do": "list"})["snapshots"]
            return [(SnapshotKey(*map(int, key)), int(count)) for key, count in items]
        except (KeyError, TypeError, ValueError):
            raise PeerMemoryError(f"{self._name} sent a malformed reply") from None

    def header(self, key: SnapshotKey) -> SnapshotHeader:
        """Returns the header of a snapshot."""
        return protocol.parse_header(self._request({"do": "header", "key": key}).get("header"))

    def read(self, key: SnapshotKey, offset: int, size: int) -> memoryview:
        """Returns bytes of a snapshot."""
        self._request({"do": "read", "key": key, "offset": offset, "size": size})
        with self._network_errors():
            return protocol.receive_bytes(self._connection, size)

    def discard_after(self, step: int) -> None:
        """Deletes the snapshots of later steps."""
        self._request({"do": "discard_after", "step": step})

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the reply."""
        with self._network_errors():
            protocol.send(self._connection, request)
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        with self._network_errors():
            reply = protocol.receive(self._connection)
        if reply is None:
            raise PeerMemoryError(f"{self._name} closed the connection")
        if "error" in reply:
            raise PeerMemoryError(f"{self._name}: {reply['error']}")
        return reply

    @contextmanager
    def _network_errors(self) -> Iterator[None]:
        """Raises PeerMemoryError in place of OSError."""
        try:
            yield
        except OSError as error:
            raise PeerMemoryError(f"{self._name} cannot be reached ({error.strerror or error})") from None
