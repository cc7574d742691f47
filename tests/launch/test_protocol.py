"""Messages of the launcher: decoding returns what was encoded, and anything else is refused."""

from __future__ import annotations

import json
import pickle
import socket

import pytest

from jaxtrain.errors import ProtocolError
from jaxtrain.io.authenticated import Session
from jaxtrain.launch.protocol import MAX_BYTES, PURPOSE, Channel, ConnectionClosed, decode, encode

EXIT = {"generation": 3, "rank": 1, "pid": 77, "code": -9, "is_ended_by_jax": False}
IDLE = {"generation": 3, "port": 5, "memory_step": -1}


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX)
    a.settimeout(5)
    yield a, b
    a.close()
    b.close()


def accepted(connection: tuple[socket.socket, socket.socket]) -> tuple[Session, Channel]:
    """Returns an authenticated client without its socket, and the channel of its server over one of a pair."""
    client, channel = Session("s", PURPOSE, is_server=False), Channel(connection[1], "s", is_server=True)
    connection[0].sendall(client.outgoing())
    channel.receive()
    client.take(connection[0].recv(client.wanted))
    connection[0].sendall(client.outgoing())
    channel.receive()
    return client, channel


def test_messages_arrive_however_they_are_split(pair):
    client, channel = accepted(pair)
    messages = (encode("exit", **EXIT), encode("heartbeat"), encode("idle", **IDLE))
    data, got = b"".join(b"".join(client.seal(message)) for message in messages), []
    for i in range(0, len(data), 7):
        pair[0].sendall(data[i : i + 7])
        got += channel.receive()
    assert got == [{"kind": "exit", **EXIT}, {"kind": "heartbeat"}, {"kind": "idle", **IDLE}]
    pair[0].close()
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
    client, channel = accepted(pair)
    with pytest.raises(ProtocolError, match=str(MAX_BYTES)):
        encode("end", code=1, text="x" * MAX_BYTES, revision=1)
    pair[0].sendall(client.seal(b"x" * (MAX_BYTES + 1))[0])
    with pytest.raises(ProtocolError, match="expected at most"):
        channel.receive()
