"""Server of the leader: connections of the agents, lines on the terminal, and RUN_DIR/launch.jsonl."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain.errors import ProtocolError, UserError, escape_unprintable
from jaxtrain.io.jsonl import append_record, read_records
from jaxtrain.launch.leader import Leader
from jaxtrain.launch.protocol import VERSION, Channel, ConnectionClosed, Message
from jaxtrain.launch.types import LaunchEvent, Phase

EVENTS = "launch.jsonl"
MAX_PENDING = 64  # connections that have not joined yet
MAX_SLOTS = 4096  # of a node
JOIN_TIMEOUT = 10.0  # seconds from a connection to its join message
LEAVE_TIMEOUT = 10.0  # seconds that agents have to disconnect at the end


def last_generation(directory: Path) -> int:
    """Returns the number of the last generation of a run; 0 for none."""
    numbers = [record.get("generation") for _, record in read_records(directory / EVENTS) if record]
    return max((number for number in numbers if isinstance(number, int)), default=0)


class LeaderServer:
    """Runs a `Leader` in a thread of node 0 until its job is over and the agents have disconnected."""

    def __init__(self, leader: Leader, host: str, port: int, secret: str, show: Callable[[str], None]) -> None:
        """Creates the leader server.

        Args:
            leader: makes the decisions.
            host: address to listen on.
            port: port to listen on; 0 chooses a free one.
            secret: secret of the job, which agents must know.
            show: shows a line on the terminal.

        Raises:
            UserError: the server cannot listen on the address.
        """
        self._leader, self._secret, self._show = leader, secret, show
        self._has_reported_stranger = False
        try:
            self._listener = socket.create_server((host, port), backlog=MAX_PENDING)
        except OSError as error:
            what = error.strerror or error
            message = f"launch: the leader cannot listen on {host}:{port} ({what})"
            raise UserError(f"{message}; expected an address of node 0 and a free port") from None
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pending: dict[Channel, float] = {}  # connections that have not joined, by time of connection
        self._nodes: dict[int, Channel] = {}
        self._events = Path(leader.job.directory) / EVENTS
        self._events.touch()  # raises before any worker starts if the directory is read-only
        self._thread = threading.Thread(target=self._serve, name="leader", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Waits until the last agent has disconnected, or `LEAVE_TIMEOUT` has passed."""
        self._thread.join(LEAVE_TIMEOUT)

    def _serve(self) -> None:
        try:
            until = None
            while until is None or (self._nodes and time.monotonic() < until):
                wait = min(self._leader.seconds_to_deadline(), self._leader.policy.heartbeat / 4, 1.0)
                for key, _ in self._selector.select(wait):
                    self._accept() if key.fileobj is self._listener else self._receive(key.data)
                self._leader.tick()
                self._drop_late()
                self._flush()
                if until is None and self._leader.phase is Phase.OVER:
                    until = time.monotonic() + LEAVE_TIMEOUT
        finally:  # agents whose connection closes end their workers
            for channel in [*self._nodes.values(), *self._pending]:
                channel.close()
            self._listener.close()
            self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._pending) >= MAX_PENDING:  # an agent joins within one round trip, so the oldest is none
            self._refuse(next(iter(self._pending)), f"{MAX_PENDING} others that have not joined are connected")
        channel = Channel(connection, self._secret, is_server=True)
        self._pending[channel] = time.monotonic()
        self._selector.register(channel, selectors.EVENT_READ, channel)

    def _drop_late(self) -> None:
        """Closes the connections that did not join in time."""
        now = time.monotonic()
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
        if channel not in self._pending and self._node_number(channel) is None:
            return  # it was closed after the selector told of its data
        try:
            for message in channel.receive():
                self._handle(channel, message)
        except (ConnectionClosed, ProtocolError) as error:
            number = self._node_number(channel)
            if number is None:
                self._refuse(channel, str(error))
            else:
                self._drop(channel)
                is_closed = isinstance(error, ConnectionClosed)
                why = "closed its connection" if is_closed else f"sent an invalid message ({error})"
                self._leader.node_lost(number, why)

    def _node_number(self, channel: Channel) -> int | None:
        return next((number for number, other in self._nodes.items() if other is channel), None)

    def _handle(self, channel: Channel, message: Message) -> None:
        kind, number = message.pop("kind"), self._node_number(channel)
        if number is None:
            self._handle_join(channel, kind, message)
            return
        leader = self._leader
        leader.heartbeat(number)
        if kind == "heartbeat":
            channel.send("heartbeat")
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
            channel.send("end", code=2, text=text)
            raise ProtocolError(f"expected protocol version {VERSION}; found {version}")
        if self._leader.phase is Phase.OVER:
            channel.send("end", code=self._leader.code, text="the job has ended")
            raise ProtocolError("the job has ended")
        if number in self._nodes or number < 0 or not 0 < message["slots"] <= MAX_SLOTS:
            # The node's old connection may be about to be found lost: the agent tries again.
            raise ProtocolError("the node has joined already, or its number or slots are out of range")
        del self._pending[channel]
        self._nodes[number] = channel
        peer = channel.socket.getpeername()[0]
        host = escape_unprintable(host) or peer
        self._leader.node_joined(number, message["slots"], host, message["port"], message["memory_port"])

    def _drop(self, channel: Channel) -> None:
        if self._pending.pop(channel, None) is None:
            self._nodes = {number: other for number, other in self._nodes.items() if other is not channel}
        self._selector.unregister(channel)
        channel.close()

    def _flush(self) -> None:
        """Sends the leader's messages and writes its events."""
        leader = self._leader
        while leader.outbox or leader.events:
            while leader.events:
                self._write(leader.events.popleft())
            number, kind, fields = leader.outbox.popleft() if leader.outbox else (-1, "", {})
            channel = self._nodes.get(number)
            if channel is None:
                continue
            try:
                channel.send(kind, **fields)
            except ConnectionClosed:
                self._drop(channel)
                leader.node_lost(number, "closed its connection")
        for number in self._nodes.keys() - leader.pool.nodes.keys():  # lost nodes, whose agents may join again
            self._drop(self._nodes[number])

    def _write(self, event: LaunchEvent) -> None:
        self._show(f"launch  {event.line}")
        if event.record is not None:
            try:
                append_record(self._events, event.record)
            except OSError as error:  # a full disk must not stop the job
                self._show(f"warning  {EVENTS}: {error}")
