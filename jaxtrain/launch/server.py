"""Server of the leader: connections of the agents, lines on the terminal, and RUN_DIR/launch.jsonl."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.distributed.job_store import DeposedError
from jaxtrain.distributed.store_types import StoreError
from jaxtrain.errors import ProtocolError, UserError, escape_unprintable
from jaxtrain.io.addresses import SIGN_INTERVAL, address_text
from jaxtrain.io.jsonl import append_record, read_records
from jaxtrain.launch.leader import Leader
from jaxtrain.launch.leadership.process import SIGN_OF_LIFE
from jaxtrain.launch.leadership.state import LeaderState
from jaxtrain.launch.protocol import VERSION, Channel, ConnectionClosed, Message
from jaxtrain.launch.types import LaunchEvent, Phase

EVENTS = "launch.jsonl"
MIN_PENDING = 64  # connections that have not joined yet, or twice the number of nodes
BACKLOG = 1024  # connections that the kernel holds until they are accepted
MAX_SLOTS = 4096  # of a node
JOIN_TIMEOUT = 10.0  # seconds from a connection to its join message
SWEEP_INTERVAL = 0.2  # seconds between looks at all connections
LEAVE_TIMEOUT = 10.0  # seconds that agents have to disconnect at the end


def last_generation(directory: Path) -> int:
    """Returns the number of the last generation of a run; 0 for none."""
    numbers = [record.get("generation") for _, record in read_records(directory / EVENTS) if record]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def listen(host: str, port: int) -> socket.socket:
    """Listens for agents; port 0 chooses a free one. Raises UserError if the address cannot be used."""
    what = ""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        found, what = [], getattr(error, "strerror", None) or str(error)
    for family, *_, address in found:  # a name may have addresses of two families, of which this node has one
        try:
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            what = what or (os.strerror(error.errno) if error.errno else str(error))  # `create_server` adds to the text
    message = f"launch: the leader cannot listen on {address_text(host, port)} ({what})"
    raise UserError(f"{message}; expected an address of this node and a free port")


class Leadership(Protocol):
    """Right to lead a job, and the state that its leaders hand on. `StateFile`, or a lease in a store.

    Attributes:
        revision: number of the leadership; each later one has a larger number.
    """

    revision: int

    def save(self, state: LeaderState) -> int:
        """Saves the state. Returns the number with which the workers' saves are compared, 0 without a store.

        Raises:
            DeposedError: another leader has followed.
            OSError: the state cannot be saved now.
        """
        ...

    def is_valid(self) -> bool:
        """Returns whether this is still the leader, as far as it knows."""
        ...


class LeaderServer:
    """Serves the agents of a job for a `Leader`, until the job is over and they have disconnected."""

    def __init__(
        self, leader: Leader, listener: socket.socket, secret: str, leadership: Leadership, show: Callable[[str], None]
    ) -> None:
        """Creates the leader server.

        Args:
            leader: makes the decisions.
            listener: socket that listens, see `listen`; closed at the end.
            secret: secret of the job, which agents must know.
            leadership: the right to lead; saves the leader's state.
            show: shows a line on the terminal; an empty one is a sign of life.
        """
        self._leader, self._secret, self._leadership, self._show = leader, secret, leadership, show
        self._listener, self._has_reported_stranger = listener, False
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pending: dict[Channel, float] = {}  # connections that have not joined, by time of connection
        self._nodes: dict[int, Channel] = {}
        self._numbers: dict[Channel, int] = {}  # of the nodes
        self._max_pending = max(MIN_PENDING, 2 * leader.policy.nodes)  # all join a new leader at once
        self._sweep_time = 0.0
        self._events = Path(leader.job.directory) / EVENTS
        self._events.touch()  # raises before any worker starts if the directory is read-only
        self._fence, self._has_reported_unsaved, self._sign_time = 0, False, 0.0

    def serve(self) -> None:
        """Serves until the last agent has disconnected, or `LEAVE_TIMEOUT` has passed after the end of the job.

        Raises:
            DeposedError: another leader has followed, or this one could not renew its lease in time.
        """
        try:
            until, began_over = None, self._leader.phase is Phase.OVER  # agents may still have to hear of it
            while until is None or ((self._nodes or began_over) and time.monotonic() < until):
                wait = min(self._leader.seconds_to_deadline(), self._leader.policy.heartbeat / 4, 1.0)
                for key, _ in self._selector.select(wait):
                    self._accept() if key.fileobj is self._listener else self._receive(key.data)
                if not self._leadership.is_valid():
                    raise DeposedError("its lease has not been renewed")
                self._leader.tick()
                self._flush()
                self._sweep()
                self._give_sign_of_life()
                if until is None and self._leader.phase is Phase.OVER and not self._leader.outbox:
                    until = time.monotonic() + LEAVE_TIMEOUT
        finally:  # agents whose connection closes look for the next leader
            for channel in [*self._nodes.values(), *self._pending]:
                channel.close()
            self._listener.close()
            self._selector.close()

    def _give_sign_of_life(self) -> None:
        if time.monotonic() - self._sign_time >= SIGN_INTERVAL:
            self._sign_time = time.monotonic()
            self._show(SIGN_OF_LIFE)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._pending) >= self._max_pending:  # an agent joins within two round trips, so the oldest is none
            self._refuse(next(iter(self._pending)), f"{self._max_pending} others that have not joined are connected")
        channel = Channel(connection, self._secret, is_server=True)
        self._pending[channel] = time.monotonic()
        self._selector.register(channel, selectors.EVENT_READ, channel)

    def _sweep(self) -> None:
        """Closes connections that did not join in time, now and then, and those of lost nodes, which may join again."""
        now = time.monotonic()
        if now < self._sweep_time:
            return
        self._sweep_time = now + SWEEP_INTERVAL
        for number in self._nodes.keys() - self._leader.pool.nodes.keys():
            self._drop(self._nodes[number])
        for channel in [channel for channel, since in self._pending.items() if now - since > JOIN_TIMEOUT]:
            self._refuse(channel, f"it did not join within {JOIN_TIMEOUT:g} s")

    def _refuse(self, channel: Channel, why: str) -> None:
        """Closes a connection that has not joined. Reports the first of those that did not authenticate."""
        if not channel.is_authenticated and not self._has_reported_stranger:
            with contextlib.suppress(OSError):  # it is gone: the next one is reported
                peer = channel.socket.getpeername()[0]
                self._show(f"launch  a connection from {peer} is refused ({why}); others will not be reported")
                self._has_reported_stranger = True
        self._drop(channel)

    def _receive(self, channel: Channel) -> None:
        if channel not in self._pending and channel not in self._numbers:
            return  # it was closed after the selector told of its data
        try:
            for message in channel.receive():
                self._handle(channel, message)
        except (ConnectionClosed, ProtocolError) as error:
            number = self._numbers.get(channel)
            if number is None:
                self._refuse(channel, str(error))
            else:
                self._drop(channel)
                is_closed = isinstance(error, ConnectionClosed)
                why = "closed its connection" if is_closed else f"sent an invalid message ({error})"
                self._leader.node_lost(number, why)

    def _handle(self, channel: Channel, message: Message) -> None:
        kind, number = message.pop("kind"), self._numbers.get(channel)
        if number is not None and number not in self._leader.pool.nodes:
            raise ProtocolError("the node has been given up")  # it may join again
        if number is None:
            self._handle_join(channel, kind, message)
            return
        leader = self._leader
        leader.heartbeat(number)
        if kind == "heartbeat":
            self._send(channel, "alive")
        elif kind == "exit":
            leader.worker_exited(number, **message)
        elif kind == "idle":
            leader.node_idle(number, **message)
        elif kind == "signal":
            leader.signal_received(number, message["number"], message["is_repeated"])
        else:
            raise ProtocolError(f"expected a message of an agent; found {kind}")

    def _handle_join(self, channel: Channel, kind: str, message: Message) -> None:
        """Handles the first message of a connection."""
        if kind != "join":
            raise ProtocolError("expected join")
        number, version, host = message["node"], message.pop("version"), message.pop("host")
        if version != VERSION:
            text = f"the leader's protocol has version {VERSION}, this agent's {version}; expected the same jaxtrain"
            self._send(channel, "end", code=2, text=text)
            raise ProtocolError(f"expected protocol version {VERSION}; found {version}")
        if self._leader.phase is Phase.OVER:
            self._send(channel, "end", code=self._leader.code, text="the job has ended")
            raise ProtocolError("the job has ended")
        if number in self._nodes or number < 0 or not 0 < message["slots"] <= MAX_SLOTS:
            # The node's old connection may be about to be found lost: the agent tries again.
            raise ProtocolError("the node has joined already, or its number or slots are out of range")
        del self._pending[channel]
        self._nodes[number], self._numbers[channel] = channel, number
        try:
            peer = channel.socket.getpeername()[0]
        except OSError as error:
            raise ConnectionClosed(str(error)) from None
        node, host = message.pop("node"), escape_unprintable(host) or peer
        self._leader.node_joined(node, host=host, **message)

    def _drop(self, channel: Channel) -> None:
        self._pending.pop(channel, None)
        if (number := self._numbers.pop(channel, None)) is not None:
            del self._nodes[number]
        self._selector.unregister(channel)
        channel.close()

    def _flush(self) -> None:
        """Saves the leader's state, then writes its events and sends its messages, none before it is saved."""
        leader = self._leader
        while leader.outbox or leader.events:
            if not self._save():
                return
            while leader.events:
                self._write(leader.events.popleft())
            while leader.outbox:
                self._deliver(*leader.outbox.popleft())

    def _save(self) -> bool:
        """Saves the leader's state. Returns whether its messages may be sent."""
        try:
            self._fence = self._leadership.save(self._leader.saved_state())
        except StoreError as error:  # it decides nothing without its store
            self._report_unsaved(f"the store does not answer ({error}); nothing is decided until it does")
            return False
        except OSError as error:  # a full disk must not stop the job
            self._report_unsaved(f"the leader's state cannot be saved ({error.strerror or error})")
            return True
        self._has_reported_unsaved = False
        return True

    def _report_unsaved(self, text: str) -> None:
        if not self._has_reported_unsaved:
            self._has_reported_unsaved = True
            self._show(f"warning  {text}")

    def _deliver(self, number: int, kind: str, fields: dict[str, Any]) -> None:
        """Sends a message to a node, if it is connected."""
        channel = self._nodes.get(number)
        if channel is None:
            return
        try:
            self._send(channel, kind, **fields, **({"fence": self._fence} if kind == "start" else {}))
        except ConnectionClosed:
            self._drop(channel)
            self._leader.node_lost(number, "closed its connection")

    def _send(self, channel: Channel, kind: str, **fields: Any) -> None:
        channel.send(kind, **fields, revision=self._leadership.revision)

    def _write(self, event: LaunchEvent) -> None:
        self._show(f"launch  {event.line}")
        if event.record is not None:
            try:
                append_record(self._events, event.record)
            except OSError as error:  # a full disk must not stop the job
                self._show(f"warning  {EVENTS}: {error}")
