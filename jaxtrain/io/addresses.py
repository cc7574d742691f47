"""Addresses of a launched job: as text, names that do not resolve yet, and ports held for who will listen there."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable

RESOLVE_RETRY = 1.0  # seconds
SIGN_INTERVAL = 0.2  # seconds between signs of life


def address_text(host: str, port: int) -> str:
    """Returns HOST:PORT, or [HOST]:PORT for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def wait_for_name(host: str, ended: threading.Event, sign_of_life: Callable[[], None]) -> bool:
    """Waits until a host name resolves, which may be later than the start of its node. Returns False if `ended` is set.

    Args:
        host: name or address.
        ended: set when nobody needs it any more.
        sign_of_life: called while waiting, also while a name server does not answer.
    """
    is_known = threading.Event()

    def resolve() -> None:
        while not ended.is_set():
            try:
                socket.getaddrinfo(host, None)
            except socket.gaierror:
                ended.wait(RESOLVE_RETRY)
                continue
            except (OSError, ValueError):
                pass  # whoever uses it says why it is no name
            is_known.set()
            return

    threading.Thread(target=resolve, name="resolve", daemon=True).start()
    while not is_known.wait(SIGN_INTERVAL):
        if ended.is_set():
            return False
        sign_of_life()
    return True


class HeldPort:
    """Free TCP port, which the kernel chooses for nobody else until `close`.

    A socket is bound to it and does not listen. Servers that set SO_REUSEADDR, as those of Python and gRPC do, can
    listen there meanwhile. gRPC also sets SO_REUSEPORT: the coordination services of two jobs that were told the same
    port would both listen, and each would get connections of both.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":  # elsewhere nobody can listen on a port that is held
            self.close()

    def close(self) -> None:
        """Lets the port go."""
        self._socket.close()
