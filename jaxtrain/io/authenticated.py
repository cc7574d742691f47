"""Connections between processes that share a secret: each proves that it knows it, and every frame carries a MAC.

    client  MAGIC, 32 random bytes A
    server  32 random bytes B, HMAC(secret, "server" purpose A B)
    client  HMAC(secret, "client" purpose A B)
    both    frames: 4 bytes of length, the payload, HMAC(key of the direction, number of the frame, length, payload)

HMAC is that of SHA-256 (RFC 2104). The keys of the two directions derive from the secret, A and B, so that no frame of
another connection, direction or place in the order is accepted. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

from jaxtrain.errors import ProtocolError

Data = bytes | bytearray | memoryview

MAGIC = b"jaxtrain-1\n"
HANDSHAKE_TIMEOUT = 10.0  # seconds
MAX_PAYLOAD = 4 << 20  # bytes of a frame, unless a session has another limit
_NONCE = _MAC = 32  # bytes
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")


def new_secret() -> str:
    """Returns a secret of 256 random bits, as hex."""
    return secrets.token_hex(32)


class Session:
    """One side of an authenticated connection, without its socket.

    The owner sends what `outgoing` returns, and passes `wanted` bytes to `take` as they arrive.

    Args:
        secret: what both sides know; with an empty one nobody is accepted.
        purpose: kind of the connection; both sides must mean the same.
        is_server: the side that was connected to.
        limit: bytes of the largest payload that it accepts.
    """

    def __init__(self, secret: str, purpose: str, is_server: bool, limit: int = MAX_PAYLOAD) -> None:
        self._secret, self._purpose, self._is_server, self._limit = secret.encode(), purpose.encode(), is_server, limit
        self._nonces = b"" if is_server else secrets.token_bytes(_NONCE)
        self._outgoing = b"" if is_server else MAGIC + self._nonces
        self._keys: tuple[bytes, bytes] | None = None  # to send, to receive
        self._sent = self._received = 0  # frames
        self._length: bytes | None = None  # of the frame that is arriving
        self.wanted = len(MAGIC) + _NONCE if is_server else _NONCE + _MAC

    @property
    def is_authenticated(self) -> bool:
        """True once the other side has proved that it knows the secret."""
        return self._keys is not None

    def outgoing(self) -> bytes:
        """Returns what to send for the handshake, once."""
        data, self._outgoing = self._outgoing, b""
        return data

    def take(self, data: Data) -> memoryview | None:
        """Takes the next `wanted` bytes that arrived. Returns the payload of a frame that they complete.

        Raises:
            ProtocolError: the other side does not know the secret, or a frame is too large or was changed.
        """
        view = memoryview(data)
        if self._keys is None:
            self._shake_hands(bytes(view))
            return None
        if self._length is None:
            self._length = bytes(view)
            (length,) = _LENGTH.unpack(self._length)
            if length > self._limit:
                raise ProtocolError(f"a message of {length} bytes; expected at most {self._limit}")
            self.wanted = length + _MAC
            return None
        payload, mac = view[:-_MAC], view[-_MAC:]
        expected = _frame_mac(self._keys[1], self._received, self._length, payload)
        if not hmac.compare_digest(mac, expected):
            raise ProtocolError("a message was changed on its way")
        self._received, self._length, self.wanted = self._received + 1, None, _LENGTH.size
        return payload

    def seal(self, payload: Data) -> tuple[bytes, Data, bytes]:
        """Returns the parts of a frame, to be sent one after the other. The session must be authenticated."""
        assert self._keys is not None
        length = _LENGTH.pack(memoryview(payload).nbytes)
        mac = _frame_mac(self._keys[0], self._sent, length, payload)
        self._sent += 1
        return length, payload, mac

    def _shake_hands(self, data: bytes) -> None:
        if self._is_server and not self._nonces:
            if not data.startswith(MAGIC):
                raise ProtocolError("not a process of jaxtrain")
            nonce = secrets.token_bytes(_NONCE)
            self._nonces = data[len(MAGIC) :] + nonce
            self._outgoing, self.wanted = nonce + self._digest("server"), _MAC
            return
        if not self._is_server:
            self._nonces += data[:_NONCE]
            self._outgoing = self._digest("client")
        other = "client" if self._is_server else "server"
        if not self._secret or not hmac.compare_digest(data[-_MAC:], self._digest(other)):
            self._outgoing = b""
            raise ProtocolError("the other side does not know the secret of this job")
        own, others = ("server", "client") if self._is_server else ("client", "server")
        self._keys = self._digest(f"frames of the {own}"), self._digest(f"frames of the {others}")
        self.wanted = _LENGTH.size

    def _digest(self, label: str) -> bytes:
        return hmac.digest(self._secret, b"\n".join((label.encode(), self._purpose, self._nonces)), "sha256")


def _frame_mac(key: bytes, number: int, length: bytes, payload: Data) -> bytes:
    mac = hmac.new(key, _COUNTER.pack(number) + length, "sha256")
    mac.update(payload)
    return mac.digest()


class Connection:
    """Authenticated connection over a blocking socket, whose timeout it uses.

    Raises:
        ProtocolError: the other side does not know the secret, or ends in the middle of a message.
        OSError: the network fails.
    """

    def __init__(self, connection: socket.socket, session: Session) -> None:
        """Shakes hands, for at most `HANDSHAKE_TIMEOUT`."""
        self.socket, self._session = connection, session
        deadline, timeout = time.monotonic() + HANDSHAKE_TIMEOUT, connection.gettimeout()
        connection.sendall(session.outgoing())
        while not session.is_authenticated:
            session.take(self._receive_before(deadline, session.wanted))
            connection.sendall(session.outgoing())
        connection.settimeout(timeout)

    def send(self, payload: Data) -> None:
        """Sends a frame."""
        for part in self._session.seal(payload):
            self.socket.sendall(part)

    def receive(self) -> memoryview | None:
        """Returns the payload of the next frame; None if the other side has closed the connection after a whole one."""
        length = self._exactly(self._session.wanted, may_end=True)
        if not length:
            return None
        self._session.take(length)
        return self._session.take(self._exactly(self._session.wanted))

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()

    def _receive_before(self, deadline: float, size: int) -> bytes:
        """Returns bytes of the handshake. A timeout of the socket alone would start again at every byte."""
        data = b""
        while len(data) < size:
            self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self.socket.recv(size - len(data))
            if not part:
                raise ProtocolError("the connection ended")
            data += part
        return data

    def _exactly(self, size: int, may_end: bool = False) -> memoryview:
        """Returns the next bytes; none if the connection ends before the first one and `may_end`."""
        data, done = memoryview(bytearray(size)), 0
        while done < size:
            count = self.socket.recv_into(data[done:])
            if not count and may_end and not done:
                return data[:0]
            if not count:
                raise ProtocolError("the connection ended")
            done += count
        return data
