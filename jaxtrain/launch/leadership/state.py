"""State of a leader, by which a restarted or another leader adopts the generation that runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtrain.io.atomic import write_atomic

FILE = "leader.json"  # in RUN_DIR


@dataclass(frozen=True)
class LeaderState:
    """State of a leader after a decision. Everything is JSON.

    Attributes:
        time: Unix time of the decision.
        phase: name of the `Phase`.
        code: exit code of a job that has ended.
        generation: number of the last generation.
        first_generation: number of the last one before this job.
        members: [node, slot] by rank.
        cause: [text, code, [node, slot] or None], why the generation is being ended.
        stop_reason: reason of a requested clean stop.
        signal: signal that asked the job to stop.
        restarts: restarts in a row without a newer checkpoint.
        start_time: Unix time of the generation's start.
        start_checkpoint: step of the newest checkpoint at that time.
        start_step: newest step at that time, in memory or on disk; -1 for none.
        memory_step: newest step in memory; -1 for none.
        most_slots: most slots that were connected at once, of which spares are held back.
        denylist: see `Denylist.as_json`.
    """

    time: float
    phase: str
    code: int | None
    generation: int
    first_generation: int
    members: list[list[int]]
    cause: list[Any] | None
    stop_reason: str | None
    signal: int | None
    restarts: int
    start_time: float
    start_checkpoint: int | None
    start_step: int
    memory_step: int
    most_slots: int
    denylist: dict[str, Any]

    def as_text(self) -> str:
        """Encodes the state as one line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> LeaderState:
        """Decodes a state. Raises ValueError if the text is none."""
        try:
            return cls(**json.loads(text))
        except (TypeError, RecursionError):
            raise ValueError("not the state of a leader of this version") from None


class StateFile:
    """Saved state in RUN_DIR/leader.json, of a job without a store: only the leader of node 0 writes it.

    The number of the leadership is larger than that of every earlier one, also of other jobs: agents may outlive a job
    whose node 0 is lost, and join the next one.
    """

    def __init__(self, directory: Path, job: str) -> None:
        """Begins a leadership.

        Args:
            directory: RUN_DIR.
            job: random text that tells this job from earlier ones in the same directory.
        """
        self._path, self._job = directory / FILE, job
        self.revision, self._state = time.time_ns(), None
        self._clean()
        try:
            saved = json.loads(self._path.read_text())
            self.revision = max(self.revision, saved["revision"] + 1)
            if saved["job"] == job:
                self._state = LeaderState.from_text(saved["state"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # there is none, or a damaged one: agents say which generation they run

    def load(self) -> LeaderState | None:
        """Returns the state that the job's last leader saved; None if this is the first one."""
        return self._state

    def save(self, state: LeaderState) -> int:
        """Saves a state. Returns 0, because there is no store that could refuse saves. Raises OSError."""
        content = {"job": self._job, "revision": self.revision, "state": state.as_text()}
        write_atomic(self._path, json.dumps(content), mode=0o600)
        return 0

    def is_valid(self) -> bool:
        """Returns True, because there is no other leader."""
        return True

    def close(self) -> None:
        """Deletes the state of a job that has ended."""
        self._path.unlink(missing_ok=True)
        self._clean()

    def _clean(self) -> None:
        """Deletes what a leader left that was killed while it saved its state."""
        for path in self._path.parent.glob(f"{FILE}.*.tmp"):
            path.unlink(missing_ok=True)
