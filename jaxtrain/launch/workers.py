"""Worker processes of one node in one generation: starts, reads, signals and kills them. Linux and macOS."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from jaxtrain.checkpoint.memory.client import VARIABLE, PeerConfig
from jaxtrain.distributed.job_store import job_prefix
from jaxtrain.distributed.save_fence import VARIABLE as FENCE_VARIABLE
from jaxtrain.distributed.save_fence import SaveFence
from jaxtrain.launch.child_process import ChildProcess
from jaxtrain.launch.exit_reasons import cause_rank
from jaxtrain.launch.protocol import Message
from jaxtrain.launch.worker_logs import Terminal, WorkerLog


def worker_environment(
    start: Message, rank: int, slot: int, base: Mapping[str, str], timeout: int, secret: str, store: str = ""
) -> dict[str, str]:
    """Builds the environment of a worker: the coordinator, its rank and its devices.

    Args:
        start: the leader's `start` message.
        rank: index of the process in the run.
        slot: index of the worker on this node.
        base: environment of this process.
        timeout: seconds that a collective of CPU devices may wait for a process.
        secret: secret of the job, for the servers of in-memory checkpoints.
        store: URL of the consensus store that decides which saves count; empty for none.
    """
    devices = start["devices_per_process"]
    env = dict(base) | {
        "JAX_COORDINATOR_ADDRESS": start["address"],
        "JAX_NUM_PROCESSES": str(start["processes"]),
        "JAX_PROCESS_ID": str(rank),
        # Without it JAX asks the scheduler, which knows this node's agent but not its workers.
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(devices))),
        "JAXTRAIN_GENERATION": str(start["generation"]),
        "PYTHONUNBUFFERED": "1",
    }
    if start["memory_every"] and start["memory_addresses"]:
        parts = (address.rpartition(":") for address in start["memory_addresses"])
        addresses = tuple((host, int(port)) for host, _, port in parts)
        peers = PeerConfig(start["memory_every"], start["generation"], secret, addresses)
        env[VARIABLE] = peers.as_text()
    if store:
        fence = SaveFence(store, job_prefix(Path(start["run"])), start["generation"], start["fence"])
        env[FENCE_VARIABLE] = fence.as_text()
    if start["is_simulated"]:
        flags = base.get("XLA_FLAGS", "")
        if "--xla_cpu_collective_timeout_seconds" not in flags:
            flags = f"{flags} --xla_cpu_collective_timeout_seconds={timeout}"
        return env | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    visible = [gpu for gpu in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    own = range(slot * devices, (slot + 1) * devices)
    gpus = [visible[i] for i in own if i < len(visible)] if visible else list(map(str, own))
    return env | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


class WorkerProcess(ChildProcess):
    """Running worker, whose output goes to its log."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], rank: int, log: WorkerLog) -> None:
        """Starts the worker. Raises OSError if that fails."""
        super().__init__(command, env)
        self.rank, self.log = rank, log

    def handle(self, stream: str, data: bytes) -> None:
        """Logs output."""
        self.log.add(stream, data)

    def close(self) -> None:
        """Cleans up after an ended worker."""
        super().close()
        self.log.close()


class WorkerGroup:
    """Workers of this node in one generation. `selector` calls the data of its keys when they are readable."""

    def __init__(self, start: Message, selector: selectors.BaseSelector, terminal: Terminal) -> None:
        self.generation: int = start["generation"]
        self._selector, self._terminal = selector, terminal
        self._folder = Path(start["run"]) / "logs"
        self.workers: list[WorkerProcess] = []
        self._is_stopping = False
        terminal.start_generation()

    def add(self, command: Sequence[str], env: Mapping[str, str], rank: int) -> None:
        """Starts a worker. The calling thread must outlive it: the worker dies with that thread."""
        self._folder.mkdir(exist_ok=True)
        log = WorkerLog(self._folder / f"{self.generation}-{rank}.log", rank, self._terminal)
        worker = WorkerProcess(command, env, rank, log)
        self.workers.append(worker)
        for stream, pipe in worker.pipes.items():
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, worker, stream))

    def _read(self, worker: WorkerProcess, stream: str) -> None:
        """Reads a pipe that the selector reported as readable."""
        if worker.read(stream) == b"":
            self._selector.unregister(worker.pipes[stream])

    def reap(self) -> list[tuple[WorkerProcess, int]]:
        """Returns the workers that ended since the last call with their exit codes, likely causes first."""
        ended = [(worker, code) for worker in self.workers if (code := worker.poll()) is not None]
        for worker, _ in ended:
            self.workers.remove(worker)
            for pipe in worker.pipes.values():
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)
            worker.close()
        return sorted(ended, key=lambda pair: cause_rank(pair[1], pair[0].log.is_ended_by_jax))

    def stop(self) -> None:
        """Sends SIGTERM, once: the workers save at the same step and exit."""
        for worker in () if self._is_stopping else self.workers:
            worker.signal(signal.SIGTERM)
        self._is_stopping = True

    def request_save(self) -> None:
        """Sends SIGUSR1 to one worker: all save at the same step and go on."""
        for worker in self.workers[:1]:
            worker.signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Sends SIGKILL, and hides what the workers still print."""
        for worker in self.workers:
            worker.log.is_quiet = True
            worker.kill()
