"""Authenticated connections: what is accepted, against HMACs worked out here, and what is refused."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.errors import ProtocolError
from jaxtrain.io import authenticated
from jaxtrain.io.authenticated import MAGIC, Connection, Session


def pair(client_secret: str = "s", server_secret: str = "s", purposes: tuple[str, str] = ("p", "p"), limit: int = 1000):
    """A client and a server that have shaken hands."""
    client = Session(client_secret, purposes[0], False, limit)
    server = Session(server_secret, purposes[1], True, limit)
    server.take(client.outgoing())
    client.take(server.outgoing())
    server.take(client.outgoing())
    assert client.is_authenticated
    assert server.is_authenticated
    return client, server


def deliver(frame: bytes, session: Session) -> bytes | None:
    """The payload of a frame, byte for byte as `wanted` says."""
    payload = None
    while frame:
        part, frame = frame[: session.wanted], frame[session.wanted :]
        payload = session.take(part)
    return None if payload is None else bytes(payload)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=300)), max_size=8))
@settings(max_examples=50)
def test_frames_arrive_unchanged_in_both_directions(messages):
    sides = pair()
    for is_server, payload in messages:
        frame = b"".join(sides[is_server].seal(payload))
        assert deliver(frame, sides[not is_server]) == payload


def test_the_bytes_are_those_of_the_description():
    def mac(key: bytes, *parts: bytes) -> bytes:
        return hmac.new(key, b"".join(parts), hashlib.sha256).digest()

    server = Session("s", "p", True)
    a = bytes(range(32))
    server.take(MAGIC + a)
    answer = server.outgoing()
    b = answer[:32]
    assert answer[32:] == mac(b"s", b"server\np\n", a, b)
    server.take(mac(b"s", b"client\np\n", a, b))
    assert server.is_authenticated
    key, length = mac(b"s", b"frames of the client\np\n", a, b), struct.pack(">I", 5)
    assert deliver(length + b"hello" + mac(key, struct.pack(">Q", 0), length, b"hello"), server) == b"hello"
    assert deliver(length + b"again" + mac(key, struct.pack(">Q", 1), length, b"again"), server) == b"again"


@pytest.mark.parametrize(
    "settings",
    [{"client_secret": "t"}, {"server_secret": "t"}, {"client_secret": "", "server_secret": ""}, {"purposes": "pq"}],
)
def test_who_does_not_know_the_secret_or_means_another_purpose_is_refused(settings):
    with pytest.raises(ProtocolError, match="does not know the secret"):
        pair(**settings)


def test_a_server_can_not_be_answered_with_its_own_proof():
    server = Session("s", "p", True)
    server.take(MAGIC + bytes(32))
    proof = server.outgoing()[32:]
    with pytest.raises(ProtocolError, match="does not know the secret"):
        server.take(proof)


@pytest.mark.parametrize("position", [0, 3, 4, 8, -1])
def test_a_changed_frame_is_refused(position):
    client, server = pair()
    frame = bytearray(b"".join(client.seal(b"hello")))
    frame[position] ^= 1
    with pytest.raises(ProtocolError, match=r"was changed|expected at most"):
        deliver(bytes(frame) + bytes(300), server)


def test_a_frame_is_accepted_once_in_its_order_on_its_connection_and_direction():
    client, server = pair()
    first, second = (b"".join(client.seal(b"x")) for _ in range(2))
    assert deliver(first, server) == b"x"
    for frame, session in ((first, server), (second, pair()[1]), (second, client)):
        with pytest.raises(ProtocolError, match="was changed"):
            deliver(frame, session)


def test_a_length_above_the_limit_is_refused_before_its_bytes_are_awaited():
    _, server = pair()
    with pytest.raises(ProtocolError, match="a message of 4294967295 bytes; expected at most 1000"):
        server.take(b"\xff" * 4)


@given(st.binary(min_size=43, max_size=43))
@settings(max_examples=50)
def test_garbage_is_no_hello(data):
    session = Session("s", "p", True)
    if not data.startswith(MAGIC):
        with pytest.raises(ProtocolError, match="not a process of jaxtrain"):
            session.take(data)


def test_connections_pass_large_payloads_and_see_a_clean_and_a_broken_end():
    a, b = socket.socketpair()
    sides: list[Connection] = []
    thread = threading.Thread(target=lambda: sides.append(Connection(b, Session("s", "p", True))))
    thread.start()
    client = Connection(a, Session("s", "p", False))
    thread.join(10)
    (server,) = sides
    payload = bytes(range(256)) * 4096
    sender = threading.Thread(target=client.send, args=(payload,))
    sender.start()
    assert server.receive() == payload
    sender.join(10)
    a.sendall(b"\0")
    client.close()
    with pytest.raises(ProtocolError, match="the connection ended"):
        server.receive()
    server.close()


@pytest.mark.measures
def test_a_handshake_byte_by_byte_ends_in_time(monkeypatch):
    monkeypatch.setattr(authenticated, "HANDSHAKE_TIMEOUT", 0.5)
    a, b = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.2):
            a.send(MAGIC[:1])

    thread = threading.Thread(target=drip)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        Connection(b, Session("s", "p", True))
    assert time.monotonic() - begun < 5
    stop.set()
    thread.join(10)
    a.close()
    b.close()
