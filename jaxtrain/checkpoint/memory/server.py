"""Snapshots in the memory of a node's agent, and the server through which workers read and write them.

All processes are at the same step: a process starts the snapshot of a step after it finished the previous one, and
none can finish a step that another has not started. So once a third step of a process is here, its first is complete
everywhere, on two nodes for each snapshot, and older steps are not needed any more.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from jaxtrain.checkpoint.memory import protocol
from jaxtrain.checkpoint.memory.protocol import SnapshotKey
from jaxtrain.errors import PeerMemoryError
from jaxtrain.io.authenticated import Connection

KEPT_STEPS = 3  # of each process
MAX_CONNECTIONS = 1024
MAX_STRANGERS = 64  # of these, connections that have not authenticated
RESERVED = 0.1  # share of the available memory that stays free


class SnapshotStore:
    """Snapshots by key: (header as JSON, bytes). Thread-safe."""

    def __init__(self) -> None:
        self._snapshots: dict[SnapshotKey, tuple[dict[str, Any], memoryview]] = {}
        self._lock = threading.Lock()

    def put(self, key: SnapshotKey, header: dict[str, Any], data: memoryview) -> None:
        """Adds a snapshot, and deletes those that no restart can need any more."""
        with self._lock:
            self._snapshots[key] = header, data
            steps = sorted(other.step for other in self._snapshots if other[::2] == key[::2])
            if len(steps) < KEPT_STEPS:
                return
            for other in [*self._snapshots]:
                is_old = other[::2] == key[::2] and other.step < steps[-KEPT_STEPS]
                if is_old or other.generation < key.generation:
                    del self._snapshots[other]

    def snapshots(self) -> list[tuple[SnapshotKey, int]]:
        """Lists the snapshots: (key, number of processes of its step)."""
        with self._lock:
            return [(key, header["processes"]) for key, (header, _) in self._snapshots.items()]

    def get(self, key: SnapshotKey) -> tuple[dict[str, Any], memoryview]:
        """Returns header and bytes. Raises PeerMemoryError if there is no such snapshot."""
        with self._lock:
            if key not in self._snapshots:
                raise PeerMemoryError(f"no snapshot of process {key.process} at step {key.step}")
            return self._snapshots[key]

    def discard_after(self, step: int) -> None:
        """Deletes the snapshots of later steps."""
        with self._lock:
            self._snapshots = {key: snapshot for key, snapshot in self._snapshots.items() if key.step <= step}

    def newest_complete_step(self) -> int:
        """Returns the newest step but one, which is complete on all nodes; -1 if there is none."""
        with self._lock:
            steps = sorted({key.step for key in self._snapshots})
        return steps[-2] if len(steps) > 1 else -1


class SnapshotServer(socketserver.ThreadingTCPServer):
    """Serves a `SnapshotStore` to clients that know the secret of the job, until it is closed.

    Attributes:
        store: the snapshots.
        secret: secret of the job.
        port: port that it listens on.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, secret: str, show: Callable[[str], None]) -> None:
        """Listens on a free port of `host`; `show` shows a line on the terminal. Raises OSError if it cannot."""
        self.store, self.secret, self._show = SnapshotStore(), secret, show
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._strangers: dict[socket.socket, None] = {}  # connections that have not authenticated, oldest first
        self._lock, self._has_reported_stranger = threading.Lock(), False
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, name="snapshot-server", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a new thread, or closes it if there are too many."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            if len(self._strangers) >= MAX_STRANGERS:  # a worker authenticates within one round trip
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Body of the thread of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.forget_stranger(request)
            self._slots.release()

    def forget_stranger(self, request: socket.socket) -> None:
        """Handles that a connection has authenticated, or has ended."""
        with self._lock:
            self._strangers.pop(request, None)

    def report_stranger(self, address: str, why: str) -> None:
        """Shows why a connection is refused, the first time."""
        with self._lock:
            is_first, self._has_reported_stranger = not self._has_reported_stranger, True
        if is_first:
            self._show(f"launch  a connection from {address} is refused ({why}); others will not be reported")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a broken connection; the worker reports it."""

    def close(self) -> None:
        """Stops the server and drops the snapshots."""
        self.shutdown()
        self.server_close()


class _Handler(socketserver.BaseRequestHandler):
    """Answers the requests of one connection."""

    request: socket.socket
    server: SnapshotServer
    connection: Connection

    def handle(self) -> None:
        try:
            self.connection = protocol.connect(self.request, self.server.secret, is_server=True)
        except (PeerMemoryError, OSError) as error:
            self.server.report_stranger(self.client_address[0], str(error))
            return
        self.server.forget_stranger(self.request)
        while True:
            try:
                request = protocol.receive(self.connection)
                if request is None:
                    return
                self._answer(request)
            except PeerMemoryError as error:
                protocol.send(self.connection, {"error": str(error)})
                return
            except (KeyError, TypeError, ValueError):
                protocol.send(self.connection, {"error": "malformed request"})
                return

    def _answer(self, request: dict[str, Any]) -> None:
        store, kind = self.server.store, request["do"]
        if kind == "list":
            protocol.send(self.connection, {"snapshots": store.snapshots()})
        elif kind == "discard_after":
            store.discard_after(int(request["step"]))
            protocol.send(self.connection, {})
        elif kind in ("put", "header", "read"):
            key = SnapshotKey(*map(int, request["key"]))
            if kind == "put":
                self._receive(key, request["header"])
            elif kind == "header":
                protocol.send(self.connection, {"header": store.get(key)[0]})
            else:
                self._send_range(store.get(key)[1], int(request["offset"]), int(request["size"]))
        else:
            raise PeerMemoryError("malformed request")

    def _send_range(self, data: memoryview, offset: int, size: int) -> None:
        if not 0 <= offset <= offset + size <= len(data):
            raise PeerMemoryError(f"bytes {offset} to {offset + size} are out of range; the snapshot has {len(data)}")
        protocol.send(self.connection, {"size": size})
        protocol.send_bytes(self.connection, [data[offset : offset + size]])

    def _receive(self, key: SnapshotKey, fields: Any) -> None:
        header, free = protocol.parse_header(fields), available_memory()
        if free is not None and header.size > (1 - RESERVED) * free:
            text = f"{header.size / 1e9:.2f} GB do not fit into the {free / 1e9:.2f} GB of available memory"
            raise PeerMemoryError(text)
        protocol.send(self.connection, {})
        self.server.store.put(key, header.as_json(), protocol.receive_bytes(self.connection, header.size))
        protocol.send(self.connection, {})


def available_memory() -> int | None:
    """Returns the bytes of memory available on this machine; None if the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
