"""Types of the leader: phases, placements, the restart policy, failure causes and events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from jaxtrain.config import Config
from jaxtrain.launch.node_pool import Slot


class Phase(Enum):
    """State of the leader."""

    WAITING = "waiting for nodes"
    RUNNING = "workers run"
    STOPPING = "workers were asked to save and stop"
    ENDING = "workers are being killed"
    ADOPTING = "a new leader waits for the nodes of the generation that runs"
    PAUSED = "waiting to start the next generation"
    OVER = "the job has ended"


@dataclass(frozen=True)
class Placement:
    """Processes and mesh of a generation.

    Attributes:
        processes: number of processes, over all nodes.
        devices: number of devices, over all processes.
        overrides: `key=value` that change the run's config.
        mesh: e.g. `data 2 x fsdp 4`.
        config: the run's config with `overrides`.
    """

    processes: int
    devices: int
    overrides: tuple[str, ...]
    mesh: str
    config: Config


@dataclass(frozen=True)
class RestartPolicy:
    """Timeouts and limits of the leader.

    Args:
        nodes: number of nodes that the first generation waits for.
        spares: slots held back.
        max_restarts: restarts in a row without a newer checkpoint.
        max_failures: failures in a row without a newer checkpoint until a slot or node goes on the denylist.
        backoff: seconds before the second restart in a row, doubled before each further one; the first is at once.
        heartbeat: seconds of silence after which a node is lost.
        join_timeout: seconds to wait for nodes.
        stop_timeout: seconds between the first clean exit of a worker and the last.
        memory_every: steps between copies of the train state to the memory of the nodes; 0: no copies.
    """

    nodes: int = 1
    spares: int = 0
    max_restarts: int = 5
    max_failures: int = 3
    backoff: float = 1.0
    heartbeat: float = 20.0
    join_timeout: float = 120.0
    stop_timeout: float = 300.0
    memory_every: int = 0


@dataclass(frozen=True)
class FailureCause:
    """Cause of the end of a generation: `code` is a `Popen.returncode`, `slot` the one that failed, if known."""

    text: str
    code: int
    slot: Slot | None = None


@dataclass(frozen=True)
class LaunchEvent:
    """Line for the terminal, and a record for launch.jsonl unless None."""

    line: str
    record: dict[str, Any] | None = None
