"""The parts that a node's agent holds in its memory, and the server that workers reach it by.

Steps are in lockstep: a worker begins to copy a step when it has copied the one before, and no process can finish a
step that another has not begun. So when a third step of a process is here, its first is whole everywhere, on two nodes
each part, and what is older than that is not needed any more.
"""

from __future__ import annotations

import hmac
import socket
import socketserver
import threading
from io import BufferedIOBase
from typing import Any

from jaxtrain.checkpoint.memory.format import Key, read_header
from jaxtrain.checkpoint.memory.protocol import PATIENCE, receive, receive_bytes, send, send_bytes
from jaxtrain.errors import PeerMemoryError

KEPT = 3  # steps of a process
MOST = 1024  # connections at a time
SPARE = 0.1  # of the memory that is left, for everything else


class Stock:
    """Parts by their keys: (header as JSON, bytes). Any thread."""

    def __init__(self) -> None:
        self._parts: dict[Key, tuple[dict[str, Any], memoryview]] = {}
        self._lock = threading.Lock()

    def put(self, key: Key, header: dict[str, Any], data: memoryview) -> None:
        """Takes a part; older ones that nobody can need any more go."""
        with self._lock:
            self._parts[key] = header, data
            own = sorted(k.step for k in self._parts if k[::2] == key[::2])
            if len(own) < KEPT:
                return
            for known in [*self._parts]:
                is_own = known[::2] == key[::2]
                if known.generation < key.generation or (is_own and known.step < own[-KEPT]):
                    del self._parts[known]

    def listed(self) -> list[tuple[Key, int]]:
        """Keys, and how many processes a step of theirs has."""
        with self._lock:
            return [(key, header["processes"]) for key, (header, _) in self._parts.items()]

    def part(self, key: Key) -> tuple[dict[str, Any], memoryview]:
        """Header and bytes. Raises PeerMemoryError where there is no such part."""
        with self._lock:
            if key not in self._parts:
                raise PeerMemoryError(f"there is no part of process {key.process} of step {key.step}")
            return self._parts[key]

    def forget(self, after: int) -> None:
        """Training goes on from step `after`: later ones never happened."""
        with self._lock:
            self._parts = {key: part for key, part in self._parts.items() if key.step <= after}

    def progress(self) -> int:
        """The newest step but one: the one before the newest is whole. -1 where there is none."""
        with self._lock:
            steps = sorted({key.step for key in self._parts})
        return steps[-2] if len(steps) > 1 else -1


class StockServer(socketserver.ThreadingTCPServer):
    """Serves a stock to whoever knows the job's token, until it is closed.

    Attributes:
        stock: what it serves.
        token: of the job; nobody is served while it is empty.
        port: it listens on.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str) -> None:
        """Raises OSError where nothing can be listened on there."""
        self.stock, self.token = Stock(), ""
        self._room = threading.Semaphore(MOST)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, name="stock", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for each connection, while there are few."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke off: the worker knows, and says so."""

    def close(self) -> None:
        """Stops to serve; the parts are gone."""
        self.shutdown()
        self.server_close()


class _Handler(socketserver.StreamRequestHandler):
    """One connection: requests until it ends."""

    timeout = PATIENCE
    disable_nagle_algorithm = True
    server: StockServer
    rfile: BufferedIOBase

    def handle(self) -> None:
        while True:
            try:
                request = receive(self.rfile)
                if request is None or not self._is_known(request):
                    return
                self._answer(request)
            except PeerMemoryError as error:
                send(self.request, {"error": str(error)})
                return
            except (KeyError, TypeError, ValueError):
                send(self.request, {"error": "what came is no request"})
                return

    def _is_known(self, request: dict[str, Any]) -> bool:
        token = self.server.token
        return bool(token) and hmac.compare_digest(str(request.get("token", "")).encode(), token.encode())

    def _answer(self, request: dict[str, Any]) -> None:
        stock, kind = self.server.stock, request["do"]
        if kind == "list":
            send(self.request, {"parts": stock.listed()})
        elif kind == "forget":
            stock.forget(int(request["after"]))
            send(self.request, {})
        elif kind == "put":
            self._take(stock, Key(*map(int, request["key"])), request["header"])
        elif kind == "header":
            send(self.request, {"header": stock.part(Key(*map(int, request["key"])))[0]})
        elif kind == "read":
            _, data = stock.part(Key(*map(int, request["key"])))
            offset, size = int(request["offset"]), int(request["size"])
            if not 0 <= offset <= offset + size <= len(data):
                raise PeerMemoryError(f"a part of {len(data)} bytes has none from {offset} to {offset + size}")
            send(self.request, {"size": size})
            send_bytes(self.request, [data[offset : offset + size]])
        else:
            raise PeerMemoryError("what came is no request")

    def _take(self, stock: Stock, key: Key, found: Any) -> None:
        header = read_header(found)
        left = available()
        if left is not None and header.size > (1 - SPARE) * left:
            raise PeerMemoryError(
                f"{header.size / 1e9:.2f} GB do not fit the {left / 1e9:.2f} GB of memory that are left"
            )
        send(self.request, {})
        stock.put(key, header.as_json(), receive_bytes(self.rfile, header.size))
        send(self.request, {})


def available() -> int | None:
    """Bytes of memory that are left here; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
