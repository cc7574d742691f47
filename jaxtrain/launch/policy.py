"""What the leader is given and what it gives: its patience, the run it leads, causes and news."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from jaxtrain.config import Config
from jaxtrain.launch.roster import Slot


class Phase(Enum):
    """Where the leader is in a generation's life."""

    WAITING = "for nodes"
    RUNNING = "workers run"
    STOPPING = "workers were asked to save and stop"
    ENDING = "workers are being killed"
    PAUSED = "until the next generation"
    OVER = "the job has ended"


@dataclass(frozen=True)
class Placement:
    """What a generation runs on.

    Attributes:
        processes: of all nodes.
        devices: of all processes.
        changes: `key=value` over the run's own config.
        mesh: e.g. `data 2 x fsdp 4`.
        config: with these changes.
    """

    processes: int
    devices: int
    changes: tuple[str, ...]
    mesh: str
    config: Config


class Run(Protocol):
    """See `job.Job`."""

    directory: Any
    is_simulated: bool

    def place(self, available: int) -> Placement | None: ...
    def begin(self, placement: Placement) -> None: ...
    def newest(self) -> int | None: ...


@dataclass(frozen=True)
class Policy:
    """How patient the leader is.

    Args:
        nodes: that the first generation waits for.
        spares: slots held back.
        max_restarts: after failures in a row without a newer checkpoint.
        failures: in a row without progress, until a slot or node is black-listed.
        backoff: seconds before the second restart in a row, doubled with each one more; the first is at once.
        heartbeat: seconds without a word after which a node is lost.
        join_timeout: seconds to wait for nodes.
        stop_timeout: seconds between the first worker that ends well and the last.
        memory: steps between copies of the state to the memory of the nodes; 0: none.
    """

    nodes: int = 1
    spares: int = 0
    max_restarts: int = 5
    failures: int = 3
    backoff: float = 1.0
    heartbeat: float = 20.0
    join_timeout: float = 120.0
    stop_timeout: float = 300.0
    memory: int = 0


@dataclass(frozen=True)
class Cause:
    """Why a generation ended. `code` is a worker's as Popen has it; `slot` is whom to blame, if anybody."""

    text: str
    code: int
    slot: Slot | None = None


@dataclass(frozen=True)
class News:
    """A line for the terminal and, unless it is only that, an object for launch.jsonl."""

    line: str
    record: dict[str, Any] | None = None
