"""The leader's side of the wire: agents' connections, lines on the terminal, RUN_DIR/launch.jsonl."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from jaxtrain.errors import ProtocolError, UserError, clean
from jaxtrain.io.jsonl import APPEND, append, read_lines
from jaxtrain.launch.leader import Leader
from jaxtrain.launch.policy import News, Phase
from jaxtrain.launch.protocol import VERSION, Channel, Closed, Message

EVENTS = "launch.jsonl"
STRANGERS = 64  # connections that have not said who they are
MOST = 4096  # slots of a node
GREETING = 10.0  # seconds in which they have to
FAREWELL = 10.0  # seconds in which agents may leave after the end


def last_generation(directory: Path) -> int:
    """Number of the last generation that a run has seen; 0 for none."""
    numbers = [record.get("generation") for _, record in read_lines(directory / EVENTS) if record]
    return max((number for number in numbers if isinstance(number, int)), default=0)


class Server:
    """Runs a `Leader` in a thread of node 0, until its job is over and the agents have left."""

    def __init__(self, leader: Leader, host: str, port: int, say: Callable[[str], None]) -> None:
        """
        Args:
            leader: decides.
            host, port: to listen on; port 0 is a free one.
            say: shows a line.

        Raises:
            UserError: the address cannot be listened on.
        """
        self._leader, self._say = leader, say
        try:
            self._listener = socket.create_server((host, port), backlog=STRANGERS)
        except OSError as error:
            what = error.strerror or error
            message = f"launch: the leader cannot listen on {host}:{port} ({what})"
            raise UserError(f"{message}; expected an address of node 0 and a free port") from None
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: dict[Channel, float] = {}
        self._nodes: dict[int, Channel] = {}
        self._events = os.open(Path(leader.run.directory) / EVENTS, APPEND, 0o644)
        self._thread = threading.Thread(target=self._serve, name="leader", daemon=True)

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def join(self) -> None:
        """Waits until the last agent has left, or the time for it is over."""
        self._thread.join(FAREWELL)

    def _serve(self) -> None:
        try:
            until = None
            while until is None or (self._nodes and time.monotonic() < until):
                wait = min(self._leader.next_tick(), self._leader.policy.heartbeat / 4, 1.0)
                for key, _ in self._selector.select(wait):
                    self._accept() if key.fileobj is self._listener else self._hear(key.data)
                self._leader.tick()
                self._pass_on()
                if until is None and self._leader.phase is Phase.OVER:
                    until = time.monotonic() + FAREWELL
        finally:  # agents see closed connections and end their workers
            for channel in [*self._nodes.values(), *self._strangers]:
                channel.close()
            self._listener.close()
            self._selector.close()
            os.close(self._events)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        now = time.monotonic()
        for channel, since in list(self._strangers.items()):
            if now - since > GREETING:
                self._drop(channel)
        if len(self._strangers) >= STRANGERS:
            connection.close()
            return
        channel = Channel(connection)
        self._strangers[channel] = now
        self._selector.register(channel, selectors.EVENT_READ, channel)

    def _hear(self, channel: Channel) -> None:
        """What one agent said."""
        try:
            for message in channel.receive():
                self._take(channel, message)
        except (Closed, ProtocolError) as error:
            number = self._number(channel)
            self._drop(channel)
            if number is not None:
                why = "closed its connection" if isinstance(error, Closed) else f"sent what is no message ({error})"
                self._leader.lost(number, why)

    def _number(self, channel: Channel) -> int | None:
        return next((number for number, known in self._nodes.items() if known is channel), None)

    def _take(self, channel: Channel, message: Message) -> None:
        kind, number = message.pop("kind"), self._number(channel)
        if number is None:
            self._greet(channel, kind, message)
            return
        leader = self._leader
        leader.beat(number)
        if kind == "beat":
            channel.send("beat")
        elif kind == "exit":
            leader.exited(number, **message)
        elif kind == "idle":
            leader.idle(number, **message)
        elif kind == "signal":
            leader.signalled(number, message["number"], message["again"])
        else:
            raise ProtocolError(f"an agent does not say {kind}")

    def _greet(self, channel: Channel, kind: str, message: Message) -> None:
        """The first message of a connection."""
        if kind != "join":
            raise ProtocolError("expected join")
        number, version, host = message["node"], message.pop("version"), message.pop("host")
        if version != VERSION:
            channel.send("end", code=2, text=f"the leader speaks version {VERSION} of its protocol, not {version}")
            raise ProtocolError("another version")
        if self._leader.phase is Phase.OVER:
            channel.send("end", code=self._leader.code, text="the job has ended")
            raise ProtocolError("too late")
        if number in self._nodes or number < 0 or not 0 < message["slots"] <= MOST:
            raise ProtocolError("there already")  # its old connection may be about to be found lost: it tries again
        del self._strangers[channel]
        self._nodes[number] = channel
        peer = channel.socket.getpeername()[0]
        self._leader.joined(number, message["slots"], clean(host) or peer, message["port"], message["memory"])

    def _drop(self, channel: Channel) -> None:
        if self._strangers.pop(channel, None) is None:
            self._nodes = {number: known for number, known in self._nodes.items() if known is not channel}
        self._selector.unregister(channel)
        channel.close()

    def _pass_on(self) -> None:
        """Sends and shows what the leader decided."""
        leader = self._leader
        while leader.outbox or leader.news:
            while leader.news:
                self._tell(leader.news.popleft())
            number, kind, fields = leader.outbox.popleft() if leader.outbox else (-1, "", {})
            channel = self._nodes.get(number)
            if channel is None:
                continue
            try:
                channel.send(kind, **fields)
            except Closed:
                self._drop(channel)
                leader.lost(number, "closed its connection")
        for number in self._nodes.keys() - leader.roster.nodes.keys():  # lost: its agent may join again
            self._drop(self._nodes[number])

    def _tell(self, news: News) -> None:
        self._say(f"launch  {news.line}")
        if news.record is not None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            try:
                append(self._events, (json.dumps({"time": now, **news.record}) + "\n").encode())
            except OSError as error:  # a full disk: the job matters more
                self._say(f"warning  {EVENTS}: {error}")
