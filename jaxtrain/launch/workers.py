"""The workers of one node in one generation: started, listened to, signalled, killed. Linux and macOS."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxtrain.checkpoint.memory.client import VARIABLE, Nodes
from jaxtrain.launch.exit_reasons import rank_of_cause
from jaxtrain.launch.protocol import Message
from jaxtrain.launch.worker_logs import Log, Terminal

PIPE = 1 << 16  # bytes read at a time
DRAIN = 1.0  # seconds of reading what an ended worker has left in its pipes


def environment(start: Message, rank: int, slot: int, base: Mapping[str, str], timeout: int) -> dict[str, str]:
    """What a worker's environment says: where the others are, and its own devices.

    Args:
        start: the leader's message.
        rank: process of the run.
        slot: place on this node.
        base: of this process.
        timeout: seconds that a collective of CPU devices may wait for a process.
    """
    count, devices = start["count"], start["devices"]
    found = dict(base) | {
        "JAX_COORDINATOR_ADDRESS": start["address"],
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(rank),
        # Otherwise JAX asks the scheduler, which knows this node's agent and not its workers.
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(devices))),
        "JAXTRAIN_GENERATION": str(start["generation"]),
        "PYTHONUNBUFFERED": "1",
    }
    if start["memory"] and start["stocks"]:
        places = (stock.rpartition(":") for stock in start["stocks"])
        stocks = tuple((host, int(port)) for host, _, port in places)
        found[VARIABLE] = Nodes(start["memory"], start["generation"], start["token"], stocks).as_text()
    if start["simulated"]:
        flags = base.get("XLA_FLAGS", "")
        if "--xla_cpu_collective_timeout_seconds" not in flags:
            flags = f"{flags} --xla_cpu_collective_timeout_seconds={timeout}"
        return found | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    visible = [gpu for gpu in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    mine = range(slot * devices, (slot + 1) * devices)
    gpus = [visible[i] for i in mine if i < len(visible)] if visible else list(map(str, mine))
    return found | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


class Worker:
    """A running worker, in a session of its own: Ctrl-C reaches it through its agent alone."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], rank: int, log: Log) -> None:
        """Raises OSError where it cannot be started."""
        self.rank, self.log = rank, log
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pipes: dict[str, IO[bytes]] = {"out": self._process.stdout, "err": self._process.stderr}
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)

    def read(self, stream: str) -> bool:
        """Takes what is in a pipe; False at its end."""
        try:
            data = os.read(self.pipes[stream].fileno(), PIPE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data:
            self.log.add(stream, data)
        return bool(data)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to it alone."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to it and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """After its end: reads what it left, ends what it started, closes its files."""
        self.kill()
        until = time.monotonic() + DRAIN
        for stream, pipe in self.pipes.items():
            while time.monotonic() < until and self._has_more(stream):
                pass
            pipe.close()
        self.log.close()

    def _has_more(self, stream: str) -> bool:
        try:
            data = os.read(self.pipes[stream].fileno(), PIPE)
        except OSError:
            return False
        self.log.add(stream, data)
        return bool(data)


class Crew:
    """All workers of this node in a generation."""

    def __init__(self, start: Message, selector: selectors.BaseSelector, terminal: Terminal) -> None:
        self.generation: int = start["generation"]
        self._selector, self._terminal = selector, terminal
        self._folder = Path(start["run"]) / "logs"
        self.workers: list[Worker] = []
        terminal.begin()

    def add(self, command: Sequence[str], env: Mapping[str, str], rank: int) -> None:
        """Starts a worker. The calling thread must live as long as it: its death is the worker's signal to end."""
        self._folder.mkdir(exist_ok=True)
        log = Log(self._folder / f"{self.generation}-{rank}.log", rank, self._terminal)
        worker = Worker(command, env, rank, log)
        self.workers.append(worker)
        for stream, pipe in worker.pipes.items():
            self._selector.register(pipe, selectors.EVENT_READ, (worker, stream))

    def read(self, worker: Worker, stream: str) -> None:
        """What a selector has said can be read."""
        if not worker.read(stream):
            self._selector.unregister(worker.pipes[stream])

    def reap(self) -> list[tuple[Worker, int]]:
        """Workers that have ended since the last call, whose end may be the cause of the others' first."""
        ended = [(worker, code) for worker in self.workers if (code := worker.poll()) is not None]
        ended.sort(key=lambda pair: rank_of_cause(pair[1]))
        for worker, _ in ended:
            self.workers.remove(worker)
            for pipe in worker.pipes.values():
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)
            worker.close()
        return ended

    def stop(self) -> None:
        """SIGTERM: they save at the same step and exit."""
        for worker in self.workers:
            worker.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL; what they still print is no news."""
        for worker in self.workers:
            worker.log.is_quiet = True
            worker.kill()
