"""Measures the leader of a launched job with 10, 100 and 1,000 agents: real sockets, one machine.

    python benchmarks/control_plane.py [--agents 10 100 1000] [--heartbeat 8] [--out control-plane.json]

The leader runs in a process of its own, as `jaxtrain launch` starts it, with a job that writes no checkpoints. All
agents are in this process; they join, send heartbeats four times in `--heartbeat` seconds, and end their workers when
they are told to, but start none. For each number of agents:

`join`        seconds from the first connection to the last agent's order to start
`cpu/beat`    processor time of the leader for a heartbeat, in microseconds, over three times `--heartbeat` seconds
`closed`      seconds from an agent's closed connection to the last agent's order to kill its workers
`next`        seconds from there to the last order to start the next generation
`silent`      the same as `closed`, for an agent that falls silent: about `--heartbeat`
`adopted`     seconds from the death of the leader to the adoption of the generation, start of Python included
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from jaxtrain.errors import ProtocolError
from jaxtrain.io.addresses import HeldPort
from jaxtrain.launch.leadership.lead import LeaderSettings, lead
from jaxtrain.launch.protocol import VERSION, Channel, ConnectionClosed
from jaxtrain.launch.types import Placement, RestartPolicy
from jaxtrain.launch.worker_logs import Terminal

SECRET = "of this benchmark alone"
LIMIT = 120.0  # seconds to wait for anything


class EmptyJob:
    """Job that fits any number of processes and never saves."""

    is_simulated = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def largest_placement(self, available: int) -> Placement | None:
        return Placement(available, available, (), "data", None) if available else None  # pyright: ignore

    def write_config(self, placement: Placement) -> None:
        pass

    def newest_checkpoint(self) -> int | None:
        return None


class Agents:
    """Agents of all nodes, in one thread."""

    def __init__(self, address: tuple[str, int], heartbeat: float) -> None:
        self._address, self._interval = address, heartbeat / 4
        self._selector = selectors.DefaultSelector()
        self.channels: dict[int, Channel] = {}
        self._generations: dict[int, int] = {}  # that run, by node
        self._due: dict[int, float] = {}
        self._silent: set[int] = set()
        self.seen: Counter[tuple[str, int]] = Counter()  # kind and generation of the orders that came
        self.beats = 0

    def join(self, numbers: list[int]) -> None:
        """Connects agents, all at once, as they do when a new leader listens."""
        waiting = list(numbers)
        until = time.monotonic() + LIMIT
        while waiting and time.monotonic() < until:
            for number in list(waiting):
                try:
                    self._join(number)
                    waiting.remove(number)
                except (OSError, ConnectionClosed, ProtocolError):
                    time.sleep(0.01)

    def _join(self, number: int) -> None:
        channel = Channel(socket.create_connection(self._address, timeout=5), SECRET, is_server=False)
        channel.authenticate(5.0)
        generation = self._generations.get(number, 0)
        channel.send(
            "join", version=VERSION, node=number, slots=1, host="127.0.0.1", port=1, memory_port=0,
            generation=generation, ranks=[number] if generation else [],
        )  # fmt: skip
        self.channels[number] = channel
        self._due[number] = time.monotonic()
        self._selector.register(channel, selectors.EVENT_READ, number)

    def close(self, number: int) -> None:
        """Closes the connection of an agent; its node is gone."""
        self._selector.unregister(self.channels[number])
        self.channels.pop(number).close()
        self._generations.pop(number, None)

    def silence(self, number: int) -> None:
        """Lets an agent say nothing more."""
        self._silent.add(number)

    def run(self, is_done: Callable[[], bool]) -> float:
        """Serves until a condition holds. Returns the seconds that took."""
        begun = time.monotonic()
        while not is_done():
            if time.monotonic() - begun > LIMIT:
                raise TimeoutError(str(dict(self.seen)))
            for key, _ in self._selector.select(0.01):
                self._receive(key.data)
            now = time.monotonic()
            for number, due in self._due.items():
                if due <= now and number in self.channels and number not in self._silent:
                    self._due[number] = now + self._interval
                    self.channels[number].send("heartbeat")
                    self.beats += 1
        return time.monotonic() - begun

    def _receive(self, number: int) -> None:
        channel = self.channels.get(number)
        if channel is None or number in self._silent:
            return
        try:
            messages = channel.receive()
        except ConnectionClosed:
            self.lost(number)
            return
        for message in messages:
            self.seen[message["kind"], message.get("generation", 0)] += 1
            if message["kind"] == "start":
                self._generations[number] = message["generation"]
            elif message["kind"] == "kill" and number in self._generations:
                exited = {"rank": number, "pid": 1, "code": -9, "is_ended_by_jax": False}
                channel.send("exit", generation=message["generation"], **exited)
                channel.send("idle", generation=message["generation"], port=1, memory_step=-1)

    def lost(self, number: int) -> None:
        """Forgets a closed connection; the agent still runs its worker."""
        self._selector.unregister(self.channels[number])
        self.channels.pop(number).close()


class LeaderProcess:
    """Leader in a process of its own."""

    def __init__(self, folder: Path, settings: LeaderSettings) -> None:
        self._folder, self._settings = folder, settings
        self.lines = open(folder / "lines", "ab")  # noqa: SIM115
        self.start()

    def start(self) -> None:
        command = [sys.executable, __file__, "lead", str(self._folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self.lines)
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(self._settings.as_text().encode())

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def measure(count: int, heartbeat: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        policy = RestartPolicy(nodes=count, heartbeat=heartbeat, join_timeout=LIMIT, max_failures=99, backoff=0.001)
        held = HeldPort()
        settings = LeaderSettings("job", "127.0.0.1", held.number, SECRET, policy)
        leader = LeaderProcess(Path(folder), settings)
        agents = Agents((settings.host, settings.port), heartbeat)
        try:
            return _measure(count, heartbeat, leader, agents, Path(folder))
        finally:
            leader.kill()
            held.close()
            for channel in agents.channels.values():
                channel.close()


def _measure(count: int, heartbeat: float, leader: LeaderProcess, agents: Agents, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"agents": count}
    while True:  # the leader is starting
        try:
            socket.create_connection(agents._address, timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    begun = time.monotonic()
    agents.join(list(range(count)))
    agents.run(lambda: agents.seen["start", 1] == count)
    row["join"] = time.monotonic() - begun
    cpu, beats, until = leader.cpu_seconds(), agents.beats, time.monotonic() + 3 * heartbeat
    agents.run(lambda: time.monotonic() > until)
    row["cpu/beat"] = (leader.cpu_seconds() - cpu) / (agents.beats - beats) * 1e6
    leader.kill()
    begun = time.monotonic()
    leader.start()
    agents.run(lambda: not agents.channels)
    agents.join(list(range(count)))
    events = folder / "launch.jsonl"
    agents.run(lambda: '"adopted"' in events.read_text())
    row["adopted"] = time.monotonic() - begun
    agents.close(count - 1)
    row["closed"] = agents.run(lambda: agents.seen["kill", 1] >= count - 1)
    row["next"] = agents.run(lambda: agents.seen["start", 2] == count - 1)
    agents.silence(count - 2)
    row["silent"] = agents.run(lambda: agents.seen["kill", 2] >= count - 2)
    return row


def main() -> None:
    if sys.argv[1:2] == ["lead"]:
        terminal = Terminal()
        lead(EmptyJob(Path(sys.argv[2])), LeaderSettings.from_text(sys.stdin.read()), terminal.show)  # pyright: ignore
        return
    parser = common.parser(__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--heartbeat", type=float, default=8.0)
    args = parser.parse_args()
    about, counts = common.machine(), [10] if args.quick else args.agents
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # each agent has a connection
    print(common.title(about))
    rows = [measure(count, 2.0 if args.quick else args.heartbeat) for count in counts]
    print(common.table(rows))
    common.report("control_plane", args, rows, about)


if __name__ == "__main__":
    main()
