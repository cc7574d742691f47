"""Agent of one node: joins the leader, starts and ends workers at its request, reports their exits.

It runs in the main thread: signals arrive there, and workers die with the thread that started them. Workers are tied to
their agent, not to the leader: when the leader ends, they go on, and the next leader adopts them.
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
from typing import Any

from jaxtrain.checkpoint.memory.server import SnapshotServer
from jaxtrain.errors import ProtocolError
from jaxtrain.exit_codes import SAVED, USAGE
from jaxtrain.io.addresses import HeldPort, address_text
from jaxtrain.launch.leadership.link import LeaderLink
from jaxtrain.launch.leadership.process import LeaderProcess
from jaxtrain.launch.protocol import VERSION, Channel, ConnectionClosed, Message, check_revision
from jaxtrain.launch.worker_logs import Terminal
from jaxtrain.launch.workers import WorkerGroup, worker_environment

LEADER_EXIT_TIMEOUT = 15.0  # seconds in which the leader process ends after its job; it waits for the other nodes
FENCE = 0.75  # share of the heartbeat timeout: after that silence an agent's workers end before the leader continues
WAIT_NOTICE = 5.0  # seconds without a leader after which an agent without workers says that it waits
REPLY_TIMEOUT = 2.0  # seconds for the leader to answer a second signal
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)

WorkerCommand = Callable[[str], Sequence[str]]  # RUN_DIR -> the command line of a worker


@dataclass(frozen=True)
class AgentConfig:
    """Settings of an agent.

    Args:
        node: index of its node.
        slots: number of workers that it can run.
        leader: (host, port) of the leader; None: the store names it.
        host: address of this node for the other nodes; empty: the address that the leader sees.
        heartbeat: seconds of silence after which the leader is lost.
        join_timeout: seconds to try to reach the leader.
        collective_timeout: seconds that a collective of CPU devices may wait.
        serves_memory: whether it serves in-memory checkpoints.
        store: URL of the consensus store of the job; empty for none.
    """

    node: int
    slots: int
    leader: tuple[str, int] | None
    host: str = ""
    heartbeat: float = 20.0
    join_timeout: float = 120.0
    collective_timeout: int = 300
    serves_memory: bool = False
    store: str = ""


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
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGUSR1:
            self.is_save_requested = True
        elif self.stops == [signal.SIGHUP] and number != signal.SIGHUP:
            self.stops[0] = number
        elif not (number == signal.SIGHUP and self.stops):
            self.stops.append(number)


class Agent:
    """Agent of one node, see the module."""

    def __init__(
        self,
        config: AgentConfig,
        command: WorkerCommand,
        terminal: Terminal,
        link: LeaderLink,
        leader: LeaderProcess | None = None,
    ) -> None:
        """Creates the agent.

        Args:
            config: its settings.
            command: command line of a worker.
            terminal: shows lines of the workers and of the launcher.
            link: connection to the leader.
            leader: leader process of this node, if it has one.
        """
        self._config, self._command, self._terminal = config, command, terminal
        self._link, self._leader = link, leader
        self._selector = selectors.DefaultSelector()
        self._channel: Channel | None = None
        self._revision = 0  # of the newest leadership that this agent knows of
        # Last message, last heartbeat, begin and end of the last connection on which the leader has answered.
        self._heard = self._sent = self._joined = self._lost = time.monotonic()
        self._is_accepted = self._has_said_waiting = False
        self._port = HeldPort()  # for the next JAX coordinator
        self._group: WorkerGroup | None = None
        self._generation, self._exits = 0, list[dict[str, Any]]()  # the last one started here, and its ended workers
        self._reported_exits, self._is_idle_reported, self._idle_time = 0, True, 0.0
        self._memory_server: SnapshotServer | None = None
        self._signals = ReceivedSignals()
        self._reported_signals = 0  # number of signals to stop that the leader knows of
        self._code: int | None = None

    def run(self) -> int:
        """Serves until the job ends. Returns its exit code, 1 if the leader cannot be reached."""
        with _recorded_signals(self._signals) as wake:
            self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(4096))
            self._selector.register(self._link, selectors.EVENT_READ, self._join)
            try:
                if self._leader is not None:
                    self._leader.start(self._selector)
                self._link.open()
                while (code := self._code) is None:
                    self._turn()
                return code
            finally:
                self._clear()
                self._link.close()
                is_connected = self._channel is not None
                if self._channel is not None:
                    self._channel.close()
                if self._leader is not None:
                    self._leader.end(LEADER_EXIT_TIMEOUT if is_connected and self._code is not None else 0.0)
                self._selector.close()
                if self._memory_server is not None:
                    self._memory_server.close()
                self._port.close()

    def _turn(self) -> None:
        """Handles what has happened, and what is due."""
        for key, _ in self._selector.select(min(self._config.heartbeat / 16, 1.0)):
            if self._selector.get_map().get(key.fd) is key:  # an earlier one may have closed it
                key.data()
        if self._leader is not None and self._code is None:
            self._code = self._leader.check()
        self._reap()
        try:
            if self._channel is not None:
                self._report(self._channel)
                self._keep_alive(self._channel)
        except (ConnectionClosed, ProtocolError) as error:
            self._lose_leader(str(error))
        if self._channel is None and self._code is None:
            self._wait_for_leader()

    def _join(self) -> None:
        """Joins a leader that the link has reached."""
        channel = self._link.take()
        if channel is None:
            return
        self._channel, self._sent, self._joined, self._is_accepted = channel, 0.0, time.monotonic(), False
        self._reported_signals = self._reported_exits = 0
        self._is_idle_reported = self._generation == 0
        self._selector.register(channel, selectors.EVENT_READ, self._receive)
        if self._config.serves_memory and self._memory_server is None:
            self._memory_server = self._open_memory_server(channel.socket.getsockname()[0])
        if self._memory_server is not None:
            self._memory_server.secret = self._link.secret
        config, group = self._config, self._group
        try:
            channel.send(
                "join", version=VERSION, node=config.node, slots=config.slots, host=config.host, port=self._hold_port(),
                memory_port=self._memory_server.port if self._memory_server is not None else 0,
                generation=self._generation, ranks=[worker.rank for worker in group.workers] if group else [],
            )  # fmt: skip
        except ConnectionClosed as error:
            self._lose_leader(str(error))

    def _receive(self) -> None:
        """Handles the leader's messages."""
        if (channel := self._channel) is None:
            return
        try:
            for message in channel.receive():
                self._handle(channel, message)
        except (ConnectionClosed, ProtocolError) as error:
            self._lose_leader(str(error))

    def _keep_alive(self, channel: Channel) -> None:
        now, heartbeat = time.monotonic(), self._config.heartbeat
        if now - self._sent >= heartbeat / 4:
            self._sent = now
            channel.send("heartbeat")
        if now - max(self._heard, self._joined) > FENCE * heartbeat:
            raise ConnectionClosed(f"no message for {FENCE * heartbeat:g} s")

    def _lose_leader(self, why: str) -> None:
        """Closes the connection and looks for the leader again. Its workers go on, see `_wait_for_leader`."""
        channel, self._channel = self._channel, None
        if channel is None or self._code is not None:
            return
        self._selector.unregister(channel)
        channel.close()
        if self._is_accepted:
            self._lost = time.monotonic()
        if self._group is not None and self._is_accepted:
            self._terminal.show(f"launch  the leader is gone ({why}): the workers of this node go on without it")
        self._link.open()

    def _wait_for_leader(self) -> None:
        """Ends the workers, or this agent, if it has been without a leader for too long, or a signal came meanwhile.

        A leader that lives may have given this node up. An agent that hears nothing ends its workers before the leader
        starts others. If the leader's machine refuses connections, no leader lives: the workers go on until one
        listens again. So they do if a store refuses the saves of workers that were given up.
        """
        now, config, link = time.monotonic(), self._config, self._link
        if stops := self._signals.stops:
            if len(stops) > 1 or (self._group is None and now > self._idle_time + FENCE * config.heartbeat):
                self._code = SAVED if len(stops) == 1 else 128 + stops[-1]
                return
            if self._group is not None:
                self._group.stop()  # the next leader hears of it and stops the others
        has_waited = now - self._lost > config.join_timeout
        silent = not link.finder.is_fenced and now - max(self._heard, link.refused_time) > FENCE * config.heartbeat
        if self._group is not None and (has_waited or silent or link.newest_generation > self._generation):
            why = "others have taken their place" if link.newest_generation > self._generation else link.problem
            self._terminal.show(f"launch  no leader ({why}): ending the workers of this node", error=True)
            self._clear()
        if self._group is None and not self._has_said_waiting and now - self._lost > WAIT_NOTICE:
            self._has_said_waiting = True
            self._terminal.show(f"launch  waiting for the leader{self._where()} ({link.problem})")
        if has_waited:
            failed = f"cannot reach the leader{self._where()} within {config.join_timeout:g} s"
            expected = "the agent of node 0 there" if config.leader else "a node that leads"
            self._terminal.show(f"jaxtrain: launch: {failed} ({link.problem}); expected {expected}", error=True)
            self._code = 1

    def _where(self) -> str:
        return f" at {address_text(*self._config.leader)}" if self._config.leader else ""

    def _hold_port(self) -> int:
        """Returns another free port, and lets the last one go."""
        held, self._port = self._port, HeldPort()
        held.close()
        return self._port.number

    def _open_memory_server(self, host: str) -> SnapshotServer | None:
        try:
            return SnapshotServer(host, self._link.secret, self._terminal.show)
        except OSError as error:
            why = f"cannot listen on {host} ({error.strerror or error})"
            self._terminal.show(f"launch  this node keeps no in-memory checkpoints: {why}", error=True)
            return None

    def _handle(self, channel: Channel, message: Message) -> None:
        kind, self._revision = message["kind"], check_revision(message, self._revision)
        self._heard = time.monotonic()
        if not self._is_accepted:
            self._is_accepted, self._has_said_waiting = True, False
            if self._group is not None and self._group.generation == message.get("generation", self._generation):
                self._terminal.show("launch  the leader is there again")
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
        self._group, self._generation = WorkerGroup(start, self._selector, self._terminal), start["generation"]
        self._exits, self._reported_exits, self._is_idle_reported = [], 0, False
        command = self._command(start["run"])
        for slot, rank in zip(start["slots"], start["ranks"]):
            env = worker_environment(
                start, rank, slot, os.environ, self._config.collective_timeout, self._link.secret, self._config.store
            )
            try:
                with _ignored_by_children(signal.SIGUSR1):  # whose default would end a worker that does not train yet
                    self._group.add(command, env, rank)
            except OSError as error:
                exists = os.path.isdir(start["run"])
                why = error.strerror or error if exists else "expected a folder that all nodes share"
                where = error.filename if exists else f"{start['run']} is not on this node"
                self._terminal.show(f"jaxtrain: launch: {where}: {why}", error=True)
                self._exits.append({"rank": rank, "pid": 0, "code": USAGE, "is_ended_by_jax": False})

    def _reap(self) -> None:
        """Collects ended workers, and passes SIGUSR1 on to a worker, which tells the others."""
        is_save_requested, self._signals.is_save_requested = self._signals.is_save_requested, False
        if self._group is None:
            return
        if is_save_requested:
            self._group.request_save()
        for worker, code in self._group.reap():
            by_jax = worker.log.is_ended_by_jax
            self._exits.append({"rank": worker.rank, "pid": worker.pid, "code": code, "is_ended_by_jax": by_jax})
        if not self._group.workers:
            self._group, self._idle_time = None, time.monotonic()

    def _report(self, channel: Channel) -> None:
        """Reports signals and ended workers to the leader."""
        while self._reported_signals < len(self._signals.stops):
            number, is_repeated = self._signals.stops[self._reported_signals], self._reported_signals > 0
            self._reported_signals += 1
            channel.send("signal", number=number, is_repeated=is_repeated)
            if is_repeated:  # does not wait for the leader's decision
                self._end_at_once(channel, number)
        while self._reported_exits < len(self._exits):
            channel.send("exit", generation=self._generation, **self._exits[self._reported_exits])
            self._reported_exits += 1
        if self._group is None and not self._is_idle_reported:
            memory_step = self._memory_server.store.newest_complete_step() if self._memory_server is not None else -1
            channel.send("idle", generation=self._generation, port=self._hold_port(), memory_step=memory_step)
            self._is_idle_reported = True

    def _end_at_once(self, channel: Channel, number: int) -> None:
        self._clear()
        self._code = 128 + number
        with contextlib.suppress(ConnectionClosed, ProtocolError):
            channel.socket.settimeout(REPLY_TIMEOUT)
            while not any(message["kind"] == "end" for message in channel.receive()):
                pass

    def _clear(self) -> None:
        """Kills all workers of this node and waits for their end."""
        while self._group is not None:
            self._group.kill()
            self._reap()
            time.sleep(0.005)


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
