"""One node's agent: joins the leader, starts the workers it is told to, reports their ends. It decides nothing.

All in one thread, which must be the main one: signals are noted there, and workers die with the thread that started
them. An agent that does not hear from its leader kills its workers before the leader goes on without them.
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

from jaxtrain.checkpoint.memory.server import StockServer
from jaxtrain.errors import ProtocolError
from jaxtrain.exit_codes import SAVED, USAGE
from jaxtrain.launch.protocol import VERSION, Channel, Closed, Message
from jaxtrain.launch.worker_logs import Terminal
from jaxtrain.launch.workers import Crew, Worker, environment

RETRY = 0.5  # seconds between tries to reach the leader
FENCE = 0.75  # of the heartbeat: without a word for so long, an agent's workers end before the leader goes on
LAST = 2.0  # seconds for the leader to answer a second signal
WAKES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

Command = Callable[[str], Sequence[str]]  # RUN_DIR -> the command of a worker


@dataclass(frozen=True)
class Place:
    """Which agent this is, and where its leader is.

    Args:
        node: number of the node.
        slots: workers it can run.
        leader: (host, port).
        host: where the other nodes reach this one; empty: the address from which the leader sees it come.
        heartbeat: seconds without a word after which the leader is lost.
        join_timeout: seconds to look for it.
        collective_timeout: seconds that a collective of CPU devices may wait.
        memory: whether it keeps states between checkpoints.
    """

    node: int
    slots: int
    leader: tuple[str, int]
    host: str = ""
    heartbeat: float = 20.0
    join_timeout: float = 120.0
    collective_timeout: int = 300
    memory: bool = False


class Agent:
    """See the module. `run` returns the code to exit with."""

    def __init__(self, place: Place, command: Command, terminal: Terminal) -> None:
        self._place, self._command, self._terminal = place, command, terminal
        self._selector = selectors.DefaultSelector()
        self._crew: Crew | None = None
        self._stock: StockServer | None = None
        self._signals: list[int] = []
        self._told = 0  # signals that the leader knows of
        self._code: int | None = None

    def run(self) -> int:
        """Serves until the job ends: its exit code, 1 where the leader cannot be reached."""
        with _noted(self._signals) as wake:
            self._selector.register(wake, selectors.EVENT_READ)
            try:
                while self._code is None:
                    channel = self._connect()
                    if channel is not None:
                        self._serve(channel, wake)
                    if self._code is None:
                        time.sleep(RETRY)
            finally:
                self._clear()
                self._selector.close()
                if self._stock is not None:
                    self._stock.close()
        return self._code

    def _connect(self) -> Channel | None:
        """The leader, once it can be reached; None, and the code is set, where it cannot."""
        host, port = self._place.leader
        until = time.monotonic() + self._place.join_timeout
        while not self._signals:
            try:
                connection = socket.create_connection((host, port), timeout=self._place.heartbeat)
                if connection.getsockname() != connection.getpeername():
                    return Channel(connection)
                connection.close()  # where nobody listens yet, TCP may have connected the socket to itself
            except OSError as error:
                if time.monotonic() > until:
                    why = error.strerror or error
                    waited = f"within {self._place.join_timeout:g} s"
                    self._terminal.show(
                        f"jaxtrain: launch: the leader at {host}:{port} was not reached {waited} ({why}); expected "
                        "the agent of node 0 there",
                        error=True,
                    )
                    self._code = 1
                    return None
            time.sleep(RETRY)
        self._code = SAVED if len(self._signals) == 1 else 128 + self._signals[-1]
        return None

    def _serve(self, channel: Channel, wake: socket.socket) -> None:
        """Does as the leader says until one of both ends."""
        self._selector.register(channel, selectors.EVENT_READ)
        self._told = 0
        try:
            if self._place.memory and self._stock is None:
                self._stock = self._opened(channel.socket.getsockname()[0])
            memory = self._stock.port if self._stock is not None else 0
            place, mine = self._place, {"host": self._place.host, "port": free_port(), "memory": memory}
            channel.send("join", version=VERSION, node=place.node, slots=place.slots, **mine)
            self._loop(channel, wake)
        except (Closed, ProtocolError) as error:
            if self._crew is not None and self._code is None:
                self._terminal.show(f"launch  the leader is lost ({error}): ending the workers here", error=True)
        finally:
            self._selector.unregister(channel)
            channel.close()
            self._clear()

    def _opened(self, host: str) -> StockServer | None:
        try:
            return StockServer(host)
        except OSError as error:
            why = f"nothing can be listened on at {host} ({error.strerror or error})"
            self._terminal.show(f"launch  no state is kept in this node's memory: {why}", error=True)
            return None

    def _loop(self, channel: Channel, wake: socket.socket) -> None:
        every, heard, beaten = self._place.heartbeat / 4, time.monotonic(), 0.0
        while self._code is None:
            for key, _ in self._selector.select(min(every / 4, 1.0)):
                if key.fileobj is wake:
                    wake.recv(4096)
                elif key.fileobj is channel:
                    heard = time.monotonic()
                    for message in channel.receive():
                        self._obey(channel, message)
                else:
                    self._read(*key.data)
            self._report(channel)
            now = time.monotonic()
            if now - beaten >= every:
                beaten = now
                channel.send("beat")
            if now - heard > FENCE * self._place.heartbeat:
                raise Closed(f"no word for {FENCE * self._place.heartbeat:g} s")

    def _read(self, worker: Worker, stream: str) -> None:
        if self._crew is not None:
            self._crew.read(worker, stream)

    def _obey(self, channel: Channel, message: Message) -> None:
        kind = message["kind"]
        if kind == "start":
            self._start(channel, message)
        elif kind == "stop" and self._crew is not None:
            self._crew.stop()
        elif kind == "kill" and self._crew is not None:
            self._crew.kill()
        elif kind == "end":
            self._code = message["code"]
            self._clear()

    def _start(self, channel: Channel, start: Message) -> None:
        """Starts the workers of a generation; one that cannot be is reported as ended."""
        self._clear()
        if self._stock is not None:
            self._stock.token = start["token"]
        self._crew = Crew(start, self._selector, self._terminal)
        command = self._command(start["run"])
        for slot, rank in zip(start["slots"], start["ranks"]):
            env = environment(start, rank, slot, os.environ, self._place.collective_timeout)
            try:
                self._crew.add(command, env, rank)
            except OSError as error:
                is_there = os.path.isdir(start["run"])
                why = error.strerror or error if is_there else "expected a folder that all nodes share"
                where = error.filename if is_there else f"{start['run']} is not on this node"
                self._terminal.show(f"jaxtrain: launch: {where}: {why}", error=True)
                channel.send("exit", generation=self._crew.generation, rank=rank, pid=0, code=USAGE)

    def _report(self, channel: Channel) -> None:
        """Tells the leader of signals and of workers that have ended."""
        while self._told < len(self._signals):
            number, again = self._signals[self._told], self._told > 0
            self._told += 1
            channel.send("signal", number=number, again=again)
            if again:  # whatever the leader says
                self._end_at_once(channel, number)
        if self._crew is None:
            return
        for worker, code in self._crew.reap():
            channel.send("exit", generation=self._crew.generation, rank=worker.rank, pid=worker.pid, code=code)
        if not self._crew.workers:
            kept = self._stock.stock.progress() if self._stock is not None else -1
            channel.send("idle", generation=self._crew.generation, port=free_port(), kept=kept)
            self._crew = None

    def _end_at_once(self, channel: Channel, number: int) -> None:
        self._clear()
        self._code = 128 + number
        with contextlib.suppress(Closed, ProtocolError):
            channel.socket.settimeout(LAST)
            while not any(message["kind"] == "end" for message in channel.receive()):
                pass

    def _clear(self) -> None:
        """No worker of this node is left."""
        if self._crew is None:
            return
        while self._crew.workers:
            self._crew.kill()
            self._crew.reap()
            time.sleep(0.005)
        self._crew = None


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _noted(signals: list[int]) -> Iterator[socket.socket]:
    """Appends SIGTERM, SIGINT and SIGHUP to `signals`; the socket can be read when one came, or a child ended."""
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("an agent needs the main thread")

    def note(number: int, frame: object) -> None:
        del frame
        if number != signal.SIGCHLD:
            signals.append(number)

    taken = [number for number in WAKES if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in taken}  # `nohup` stays in force
    descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield receiver
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        receiver.close()
        sender.close()
