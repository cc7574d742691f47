"""Agent of one node: joins the leader, starts and ends workers at its request, reports their exits.

It runs in one thread, which must be the main one: signals arrive there, and workers die with the thread that started
them. An agent that does not hear from its leader kills its workers before the leader continues without them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxtrain.checkpoint.memory.server import SnapshotServer
from jaxtrain.errors import ProtocolError
from jaxtrain.exit_codes import SAVED, USAGE
from jaxtrain.launch.protocol import VERSION, Channel, ConnectionClosed, Message
from jaxtrain.launch.worker_logs import Terminal
from jaxtrain.launch.workers import WorkerGroup, worker_environment

CONNECT_RETRY = 0.5  # seconds between attempts to reach the leader
FENCE = 0.75  # share of the heartbeat timeout: after that silence an agent's workers end before the leader continues
REPLY_TIMEOUT = 2.0  # seconds for the leader to answer a second signal
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)

WorkerCommand = Callable[[str], Sequence[str]]  # RUN_DIR -> the command line of a worker


@dataclass(frozen=True)
class AgentConfig:
    """Settings of an agent.

    Args:
        node: index of its node.
        slots: number of workers that it can run.
        leader: (host, port) of the leader.
        host: address of this node for the other nodes; empty: the address that the leader sees.
        heartbeat: seconds of silence after which the leader is lost.
        join_timeout: seconds to try to reach the leader.
        collective_timeout: seconds that a collective of CPU devices may wait.
        serves_memory: whether it serves in-memory checkpoints.
    """

    node: int
    slots: int
    leader: tuple[str, int]
    host: str = ""
    heartbeat: float = 20.0
    join_timeout: float = 120.0
    collective_timeout: int = 300
    serves_memory: bool = False


class ReceivedSignals:
    """Signals that an agent has received.

    Attributes:
        stops: those to stop. A closed terminal sends SIGHUP more than once, and service managers SIGTERM beside it;
            these count once.
        is_save_requested: SIGUSR1 has come since this was set to False.
    """

    def __init__(self) -> None:
        self.stops: list[int] = []
        self.is_save_requested = False

    def record(self, number: int) -> None:
        """Records a signal; for a handler."""
        if number == signal.SIGUSR1:
            self.is_save_requested = True
        elif self.stops == [signal.SIGHUP] and number != signal.SIGHUP:
            self.stops[0] = number
        elif number != signal.SIGCHLD and not (number == signal.SIGHUP and self.stops):
            self.stops.append(number)


class Agent:
    """Agent of one node, see the module."""

    def __init__(
        self, config: AgentConfig, command: WorkerCommand, terminal: Terminal, read_secret: Callable[[], str]
    ) -> None:
        self._config, self._command, self._terminal = config, command, terminal
        self._read_secret, self._secret = read_secret, ""  # read again for every connection: a leader may be new
        self._selector = selectors.DefaultSelector()
        self._group: WorkerGroup | None = None
        self._memory_server: SnapshotServer | None = None
        self._signals = ReceivedSignals()
        self._reported = 0  # number of signals to stop that the leader knows of
        self._code: int | None = None

    def run(self) -> int:
        """Serves until the job ends. Returns its exit code, 1 if the leader cannot be reached."""
        with _recorded_signals(self._signals) as wake:
            self._selector.register(wake, selectors.EVENT_READ)
            try:
                while self._code is None:
                    channel = self._connect()
                    if channel is not None:
                        self._serve(channel, wake)
                    if self._code is None:
                        time.sleep(CONNECT_RETRY)
            finally:
                self._clear()
                self._selector.close()
                if self._memory_server is not None:
                    self._memory_server.close()
        return self._code

    def _connect(self) -> Channel | None:
        """Connects to the leader. If it cannot be reached, sets the exit code and returns None."""
        host, port = self._config.leader
        until = time.monotonic() + self._config.join_timeout
        while not self._signals.stops:
            try:
                connection = socket.create_connection((host, port), timeout=self._config.heartbeat)
                if connection.getsockname() != connection.getpeername():
                    return self._authenticated(connection)
                connection.close()  # before the leader listens, TCP may connect the socket to itself
            except (OSError, ProtocolError) as error:
                if time.monotonic() > until:
                    why = getattr(error, "strerror", None) or error
                    failed = f"cannot reach the leader at {host}:{port} within {self._config.join_timeout:g} s"
                    message = f"jaxtrain: launch: {failed} ({why}); expected the agent of node 0 there"
                    self._terminal.show(message, error=True)
                    self._code = 1
                    return None
            time.sleep(CONNECT_RETRY)
        self._code = SAVED if len(self._signals.stops) == 1 else 128 + self._signals.stops[-1]
        return None

    def _authenticated(self, connection: socket.socket) -> Channel:
        """Returns the channel to the leader after the handshake. If that fails, closes it and raises its error."""
        try:
            self._secret = self._read_secret()
            channel = Channel(connection, self._secret, is_server=False)
            channel.authenticate()
        except (ConnectionClosed, ProtocolError):
            connection.close()
            raise
        return channel

    def _serve(self, channel: Channel, wake: socket.socket) -> None:
        """Serves a leader until one of the two ends."""
        self._selector.register(channel, selectors.EVENT_READ)
        self._reported = 0
        try:
            if self._config.serves_memory and self._memory_server is None:
                self._memory_server = self._open_memory_server(channel.socket.getsockname()[0])
            if self._memory_server is not None:
                self._memory_server.secret = self._secret
            memory_port, config = self._memory_server.port if self._memory_server is not None else 0, self._config
            channel.send(
                "join", version=VERSION, node=config.node, slots=config.slots, host=config.host, port=free_port(),
                memory_port=memory_port,
            )  # fmt: skip
            self._loop(channel, wake)
        except (ConnectionClosed, ProtocolError) as error:
            if self._group is not None and self._code is None:
                self._terminal.show(
                    f"launch  the leader is lost ({error}): ending the workers of this node", error=True
                )
        finally:
            self._selector.unregister(channel)
            channel.close()
            self._clear()

    def _open_memory_server(self, host: str) -> SnapshotServer | None:
        try:
            return SnapshotServer(host, self._secret, self._terminal.show)
        except OSError as error:
            why = f"cannot listen on {host} ({error.strerror or error})"
            self._terminal.show(f"launch  this node keeps no in-memory checkpoints: {why}", error=True)
            return None

    def _loop(self, channel: Channel, wake: socket.socket) -> None:
        interval, received, sent = self._config.heartbeat / 4, time.monotonic(), 0.0
        while self._code is None:
            for key, _ in self._selector.select(min(interval / 4, 1.0)):
                if key.fileobj is wake:
                    wake.recv(4096)
                elif key.fileobj is channel:
                    received = time.monotonic()
                    for message in channel.receive():
                        self._handle(channel, message)
                elif self._group is not None:
                    self._group.read(*key.data)
            self._report(channel)
            now = time.monotonic()
            if now - sent >= interval:
                sent = now
                channel.send("heartbeat")
            if now - received > FENCE * self._config.heartbeat:
                raise ConnectionClosed(f"no message for {FENCE * self._config.heartbeat:g} s")

    def _handle(self, channel: Channel, message: Message) -> None:
        kind = message["kind"]
        if kind == "start":
            self._start(channel, message)
        elif kind == "stop" and self._group is not None:
            self._group.stop()
        elif kind == "kill" and self._group is not None:
            self._group.kill()
        elif kind == "end":
            self._code = message["code"]
            self._clear()

    def _start(self, channel: Channel, start: Message) -> None:
        """Starts the workers of a generation; reports one that cannot be started as exited."""
        self._clear()
        self._group = WorkerGroup(start, self._selector, self._terminal)
        command = self._command(start["run"])
        for slot, rank in zip(start["slots"], start["ranks"]):
            env = worker_environment(start, rank, slot, os.environ, self._config.collective_timeout, self._secret)
            try:
                with _ignored_by_children(signal.SIGUSR1):  # whose default would end a worker that does not train yet
                    self._group.add(command, env, rank)
            except OSError as error:
                exists = os.path.isdir(start["run"])
                why = error.strerror or error if exists else "expected a folder that all nodes share"
                where = error.filename if exists else f"{start['run']} is not on this node"
                self._terminal.show(f"jaxtrain: launch: {where}: {why}", error=True)
                channel.send(
                    "exit", generation=self._group.generation, rank=rank, pid=0, code=USAGE, is_ended_by_jax=False
                )

    def _report(self, channel: Channel) -> None:
        """Reports signals and ended workers to the leader; passes SIGUSR1 on to a worker, which tells the others."""
        while self._reported < len(self._signals.stops):
            number, is_repeated = self._signals.stops[self._reported], self._reported > 0
            self._reported += 1
            channel.send("signal", number=number, is_repeated=is_repeated)
            if is_repeated:  # does not wait for the leader's decision
                self._end_at_once(channel, number)
        is_save_requested, self._signals.is_save_requested = self._signals.is_save_requested, False
        if self._group is None:
            return
        if is_save_requested:
            self._group.request_save()
        for worker, code in self._group.reap():
            fields = {"rank": worker.rank, "pid": worker.pid, "code": code}
            by_jax = worker.log.is_ended_by_jax
            channel.send("exit", generation=self._group.generation, **fields, is_ended_by_jax=by_jax)
        if not self._group.workers:
            memory_step = self._memory_server.store.newest_complete_step() if self._memory_server is not None else -1
            channel.send("idle", generation=self._group.generation, port=free_port(), memory_step=memory_step)
            self._group = None

    def _end_at_once(self, channel: Channel, number: int) -> None:
        self._clear()
        self._code = 128 + number
        with contextlib.suppress(ConnectionClosed, ProtocolError):
            channel.socket.settimeout(REPLY_TIMEOUT)
            while not any(message["kind"] == "end" for message in channel.receive()):
                pass

    def _clear(self) -> None:
        """Kills all workers of this node and waits for their end."""
        if self._group is None:
            return
        while self._group.workers:
            self._group.kill()
            self._group.reap()
            time.sleep(0.005)
        self._group = None


def free_port() -> int:
    """Returns a TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _ignored_by_children(number: signal.Signals) -> Iterator[None]:
    """Ignores a signal for the moment, which a process that is started meanwhile inherits."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def _recorded_signals(signals: ReceivedSignals) -> Iterator[socket.socket]:
    """Records received signals in `signals`. Yields a socket that becomes readable on a signal or a child's end."""
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("an agent needs the main thread")

    def record(number: int, frame: object) -> None:
        del frame
        signals.record(number)

    handled = [
        number for number in HANDLED_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, record) for number in handled}  # SIGHUP stays ignored under `nohup`
    descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield receiver
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        receiver.close()
        sender.close()
