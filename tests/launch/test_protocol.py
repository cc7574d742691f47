"""Messages of the launcher: decoding returns what was encoded, and anything else is refused."""

from __future__ import annotations

import json
import pickle
import socket

import pytest

from jaxtrain.errors import ProtocolError
from jaxtrain.launch.protocol import MAX_BYTES, Channel, ConnectionClosed, decode, encode

EXIT = {"generation": 3, "rank": 1, "pid": 77, "code": -9, "is_ended_by_jax": False}
IDLE = {"generation": 3, "port": 5, "memory_step": -1}


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX)
    a.settimeout(5)
    yield a, b
    a.close()
    b.close()


class Unix(Channel):
    """A channel over a pair of sockets that are not TCP's."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._buffer = connection, b""


def test_messages_arrive_however_they_are_split(pair):
    a, b = pair
    channel, got = Unix(b), []
    data = encode("exit", **EXIT) + encode("heartbeat") + encode("idle", **IDLE)
    for i in range(0, len(data), 7):
        a.sendall(data[i : i + 7])
        got += channel.receive()
    assert got == [{"kind": "exit", **EXIT}, {"kind": "heartbeat"}, {"kind": "idle", **IDLE}]
    a.close()
    with pytest.raises(ConnectionClosed):
        channel.receive()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1]",
        b"{",
        b'{"kind": "run", "command": "rm"}',
        b'{"kind": ["exit"]}',
        json.dumps({"kind": "exit", **EXIT, "more": 1}).encode(),
        json.dumps({"kind": "exit", **EXIT, "rank": True}).encode(),
        json.dumps({"kind": "exit", **EXIT, "rank": "1"}).encode(),
        json.dumps({"kind": "exit", "rank": 1}).encode(),
        b"[" * 30000,
        pickle.dumps({"kind": "heartbeat"}),
    ],
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ProtocolError):
        decode(line)


def test_a_message_is_bounded(pair):
    a, b = pair
    channel = Unix(b)
    with pytest.raises(ProtocolError, match=str(MAX_BYTES)):
        encode("end", code=1, text="x" * MAX_BYTES)
    a.sendall(b"x" * MAX_BYTES)

    def receive_all():
        while True:
            channel.receive()

    with pytest.raises(ProtocolError, match="more than"):
        receive_all()
