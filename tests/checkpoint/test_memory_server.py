"""Snapshot server: storing, reading, pruning and refusing, over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import xxhash

from jaxtrain.checkpoint.memory import server as server_module
from jaxtrain.checkpoint.memory.client import PeerConfig, SnapshotClient, peer_config
from jaxtrain.checkpoint.memory.protocol import (
    Piece,
    SnapshotHeader,
    SnapshotKey,
    connect,
    parse_header,
    receive,
    send,
)
from jaxtrain.checkpoint.memory.server import SnapshotServer, SnapshotStore
from jaxtrain.errors import PeerMemoryError
from jaxtrain.io.authenticated import Connection

SECRET = "of the job"
DATA = bytes(range(256)) * 5


@pytest.fixture
def shown() -> list[str]:
    """Lines that the server shows on the terminal."""
    return []


@pytest.fixture
def server(shown: list[str]):
    made = SnapshotServer("127.0.0.1", SECRET, shown.append)
    yield made
    made.close()


def header(data: bytes = DATA, processes: int = 2) -> SnapshotHeader:
    piece = Piece("w", (0,), (len(data),), 0, len(data), xxhash.xxh3_64_hexdigest(data))
    return SnapshotHeader(processes, len(data), {"w": [[2 * len(data)], "uint8"]}, (piece,), {"step": 3})


def client(server: SnapshotServer, secret: str = SECRET) -> SnapshotClient:
    return SnapshotClient(("127.0.0.1", server.port), secret)


def test_a_snapshot_is_returned_unchanged(server):
    key = SnapshotKey(1, 3, 1)
    with client(server) as one:
        one.put(key, header(), [memoryview(DATA)[:100], memoryview(DATA)[100:]])
        assert one.snapshots() == [(key, 2)]
        assert one.header(key) == header()
        assert one.read(key, 7, 300) == DATA[7:307]
    with client(server) as other:
        assert other.read(key, 0, len(DATA)) == DATA
        with pytest.raises(PeerMemoryError, match="no snapshot of process 0 at step 3"):
            other.header(SnapshotKey(1, 3, 0))


@pytest.mark.parametrize("secret", ["", "of another job", "é"])
def test_a_wrong_secret_is_refused_and_reported_once(server, shown, secret):
    for _ in range(2):
        with pytest.raises(PeerMemoryError, match="does not know the secret of this job"):
            client(server, secret)
    until(lambda: shown)
    (line,) = shown
    assert line.startswith("launch  a connection from 127.0.0.1 is refused (")
    server.secret = ""  # nobody is served without one
    with pytest.raises(PeerMemoryError, match="does not know the secret of this job"):
        client(server, "")


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_strangers_change_nothing(server, shown, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 4)
    with client(server) as one:
        one.put(SnapshotKey(1, 3, 1), header(), [memoryview(DATA)])
        address = ("127.0.0.1", server.port)
        silent = [socket.create_connection(address, timeout=10) for _ in range(10)]  # more than may be strangers
        for line in (b"GET / HTTP/1.1\r\n" * 9, b"\xff" * 100, b"jaxtrain-1\n" + bytes(32) + bytes(32)):
            with socket.create_connection(address, timeout=10) as stranger:
                stranger.sendall(line)
                while stranger.recv(1000):
                    pass
        assert one.snapshots() == [(SnapshotKey(1, 3, 1), 2)]
        assert len(server._strangers) <= 4
        with client(server) as other:
            assert other.read(SnapshotKey(1, 3, 1), 0, 10) == DATA[:10]
        for stranger in silent:
            stranger.close()
    assert len(shown) == 1


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b"\xff", b"[" * 100000, b'{"do":"run"}', b"{}"])
def test_a_malformed_request_gets_an_error(server, payload):
    with worker(server) as (connection, _):
        connection.send(payload)
        assert bytes(connection.receive() or b"").startswith(b'{"error":')
    with client(server) as one:
        assert one.snapshots() == []


@contextmanager
def worker(server: SnapshotServer) -> Iterator[tuple[Connection, socket.socket]]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        yield connect(plain, SECRET, is_server=False), plain


def test_an_incomplete_snapshot_is_dropped(server):
    with worker(server) as (connection, plain):
        send(connection, {"do": "put", "key": SnapshotKey(1, 3, 0), "header": header().as_json()})
        connection.send(DATA[:100])
        plain.shutdown(socket.SHUT_WR)
        assert receive(connection) == {}
        assert receive(connection) == {"error": "the connection ended after 100 of 1280 bytes"}
    with client(server) as one:
        assert one.snapshots() == []


def test_a_snapshot_larger_than_the_available_memory_is_refused(server, monkeypatch):
    monkeypatch.setattr(server_module, "available_memory", lambda: 1000)
    with (
        client(server) as one,
        pytest.raises(PeerMemoryError, match=r"0\.00 GB do not fit into the 0\.00 GB of"),
    ):
        one.put(SnapshotKey(1, 3, 0), header(), [memoryview(DATA)])


@pytest.mark.parametrize(
    "change", [{"pieces": [{}]}, {"size": 10}, {"size": -1}, {"tensors": {}}, {"processes": "x"}, {"manifest": 1}]
)
def test_a_malformed_header_is_refused(change):
    with pytest.raises(PeerMemoryError):
        parse_header(header().as_json() | change)


def test_old_snapshots_are_deleted():
    store = SnapshotStore()

    def put(generation: int, step: int, process: int) -> None:
        store.put(SnapshotKey(generation, step, process), header().as_json(), memoryview(DATA))

    def left() -> set[tuple[int, ...]]:
        return {tuple(key) for key, _ in store.snapshots()}

    for step in (1, 2, 3):
        put(1, step, 0)
        put(1, step, 1)
    put(1, 4, 0)
    assert left() == {(1, s, 0) for s in (2, 3, 4)} | {(1, s, 1) for s in (1, 2, 3)}  # step 3 is whole, maybe no other
    assert store.newest_complete_step() == 3
    put(2, 4, 0)
    put(2, 5, 0)
    assert {(1, 3, 0), (1, 3, 1)} < left()  # generation 2 may have no whole step yet
    put(2, 6, 0)
    assert left() == {(2, 4, 0), (2, 5, 0), (2, 6, 0)}
    store.discard_after(5)
    assert left() == {(2, 4, 0), (2, 5, 0)}


def test_peer_config_round_trip():
    there = PeerConfig(2, 3, "t", (("10.0.0.1", 80), ("::1", 81)))
    assert peer_config({"JAXTRAIN_PEERS": there.as_text()}) == there
    assert peer_config({}) is None
