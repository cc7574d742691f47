"""Tracker that writes metrics.jsonl and events.jsonl of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxtrain.io import jsonl

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


class JsonlTracker:
    """Writes RUN_DIR/metrics.jsonl (an object per logged step) and events.jsonl ({time, kind, ...} per event).

    Every line is one write to an appending file: a killed process loses no earlier line and leaves at most the last one
    incomplete, which the next start removes. A start after step N removes the lines of later steps, which this run
    will write again; the start event has their number (`cut`). Numbers that are not finite become the strings "nan",
    "inf" and "-inf", because JSON has no such numbers; Python's float() reads them back.
    """

    def __init__(self, run_dir: Path):
        self._dir, self._files = Path(run_dir), {}

    def start(self, info: Mapping[str, Any]) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)
        step = int(info.get("step", 0))
        cut = jsonl.truncate_after(self._dir / METRICS, step)
        jsonl.truncate_after(self._dir / EVENTS, None)
        for name in (METRICS, EVENTS):
            self._files[name] = jsonl.AppendedFile(self._dir / name)
        fields = {key: value for key, value in info.items() if key != "config"}
        self.event("resume" if step else "start", **fields, **({"cut": cut} if cut else {}))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write(METRICS, {"step": step, **values})

    def event(self, kind: str, **fields: Any) -> None:
        self._write(EVENTS, jsonl.timestamped({"kind": kind, **fields}))

    def artifact(self, path: Path) -> None:
        """Does nothing: artifacts are in the run directory already."""

    def rewind(self, step: int) -> None:
        self._files.pop(METRICS).close()
        jsonl.truncate_after(self._dir / METRICS, step)
        self._files[METRICS] = jsonl.AppendedFile(self._dir / METRICS)

    def close(self) -> None:
        with ExitStack() as files:  # closes all, whichever fails
            while self._files:
                files.callback(self._files.popitem()[1].close)

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        self._files[name].append(jsonl.encode_record(record))


def append_event(run_dir: Path, kind: str, **fields: Any) -> None:
    """Appends to events.jsonl without the trackers, which may no longer work."""
    jsonl.append_record(run_dir / EVENTS, {"kind": kind, **fields})


def furthest_step(run_dir: Path) -> int:
    """Returns the largest step that a run in this folder began, by its files."""
    steps = [record.get("step", 0) for _, record in jsonl.read_records(run_dir / METRICS) if record]
    events = [event for _, event in jsonl.read_records(run_dir / EVENTS) if event]
    steps += [event.get(name, 0) for event in events for name in ("step", "reached")]
    return max((step for step in steps if isinstance(step, int)), default=0)
