"""Folders of runs as they are left by real ones: lines written by the same code, at times in the hand of the test."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGAN = 1_800_000_000.0  # Unix seconds


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat(timespec="milliseconds")


class Folder:
    """Writes events at seconds since the first process began."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def event(self, at: float, kind: str, **fields: Any) -> None:
        self._append("events.jsonl", {"time": stamp(at), "kind": kind, **fields})

    def launch(self, at: float, kind: str, generation: int, **fields: Any) -> None:
        self._append("launch.jsonl", {"time": stamp(at), "kind": kind, "generation": generation, **fields})

    def steps(self, first: int, last: int, **fields: Any) -> None:
        for step in range(first, last + 1):
            record = {
                "step": step,
                "loss": 5.0 / step,
                "lr": 1e-3,
                "tokens": 100 * step,
                "tokens_per_sec": 1000.0 + step,
            }
            self._append("metrics.jsonl", {**record, "step_time": 0.1, "data_wait": 0.01, "mfu": 0.4, **fields})

    def ledger(
        self, at: float, step: int, phase: str = "compute", boot: str = "", uptime: float = 0.0, **seconds: float
    ) -> None:
        elapsed = sum(seconds.values())
        machine = {"boot": boot, "uptime": uptime} if boot else {}
        self.event(at, "ledger", step=step, phase=phase, reached=step, elapsed=elapsed, seconds=seconds, **machine)

    def broken(self, name: str) -> None:
        with (self.path / name).open("a") as file:
            file.write('{"time": "2027-01-15T08:0')

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")


def three_attempts(path: Path, text: str = "cannot be deleted") -> Folder:
    """Killed after 100 s, hung after 50 s more, finished; down for 20 s and 10 s between."""
    run = Folder(path)
    run.event(10, "start", step=0, name="my run", steps=30, processes=2)
    run.ledger(10, 0, "init", init=10.0)
    run.event(30, "compiled", step=1, seconds=20.0)
    run.event(60, "save", step=10, size="0.5 MiB", seconds=0.25, stall=0.01)
    run.ledger(100, 15, init=10.0, compile=20.0, compute=60.0, data=10.0)
    run.event(130, "resume", step=10, name="my run", steps=30, processes=2)
    run.event(140, "warning", text=text)
    run.ledger(169, 20, "data", init=8.0, restore=2.0, compile=10.0, replay=15.0, data=14.0)
    run.event(170, "hang", step=20, phase="data", process=1, host="h1", file="hang-1.txt", seconds=9, deadline=8)
    run.event(190, "resume", step=20, name="my run", steps=30, processes=2)
    run.ledger(280, 30, init=10.0, compile=10.0, compute=60.0, eval=10.0, checkpoint=10.0)
    run.event(280, "stop", step=30, reason="finished")
    run.steps(1, 29)
    run.steps(30, 30, **{"eval/loss": 0.25, "eval/cross_entropy": 0.25})
    return run
