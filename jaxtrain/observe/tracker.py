"""Trackers: where metrics and events of a run go. No JAX.

A tracker is told what happens; it never decides anything, and one that fails never stops training.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.config.schema import Config

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # flags of a file that lines are appended to


class Tracker(Protocol):
    """What the train loop speaks to. Only process 0 has trackers."""

    def start(self, info: Mapping[str, Any]) -> None:
        """The run starts, or goes on, after `info["step"]` finished steps (0: afresh).

        Other keys, all optional: `name`, `steps`, `config` (resolved, a plain dict), `unigram_entropy` (nats per
        token), `flops` and `peak` (as stated), `mesh`, `versions`...
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers at `step` finished steps, read from the device already."""

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened: save, eval, stop..., with `step` and what else is known."""

    def artifact(self, path: Path) -> None:
        """A file or folder worth keeping with the run, such as the loss plot or a checkpoint."""

    def rewind(self, step: int) -> None:
        """Training goes on from `step` again: what was logged of later steps counts no more."""

    def close(self) -> None:
        """The run ends, for whatever reason."""


class Observers:
    """Passes everything on to several trackers; one that raises is reported in one line and dropped."""

    def __init__(self, members: Iterable[Tracker], report: Callable[[str], None] = print):
        self.members, self._report = list(members), report

    def start(self, info: Mapping[str, Any]) -> None:
        self._each("start", info)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each("log", step, values)

    def event(self, kind: str, **fields: Any) -> None:
        self._each("event", kind, **fields)

    def record(self, kind: str, **fields: Any) -> None:
        """An event for `jaxtrain report` that is no news: only files keep it. Any thread may call this."""
        self._each("event", kind, among=Files, **fields)

    def artifact(self, path: Path) -> None:
        self._each("artifact", path)

    def rewind(self, step: int) -> None:
        self._each("rewind", step)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any, among: type = object, **kwargs: Any) -> None:
        for member in [member for member in self.members if isinstance(member, among)]:
            try:
                getattr(member, method)(*args, **kwargs)
            except Exception as error:  # whatever a disk, a network or a library raises: training goes on
                if member not in self.members:
                    return  # another thread was first
                self.members.remove(member)
                said = " ".join(str(error).split()) or type(error).__name__
                self._report(f"{type(member).__name__} tracker dropped, training goes on: {method}: {said[:200]}")


class Files:
    """RUN_DIR/metrics.jsonl (an object per logged step) and events.jsonl ({time, kind, ...} per event).

    Every line is one write to an appending file: a killed process loses none and leaves at most the last one broken,
    which the next start removes. A start after step N cuts the lines of later steps, which a dead run had written
    and this one will write again; the start event says how many (`cut`). Numbers that are not finite become the
    strings "nan", "inf" and "-inf", which Python's float() reads back: JSON has no others.
    """

    def __init__(self, run_dir: Path):
        self._dir, self._files = Path(run_dir), {}

    def start(self, info: Mapping[str, Any]) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)
        step = int(info.get("step", 0))
        cut = cut_after(self._dir / METRICS, step)
        cut_after(self._dir / EVENTS, None)
        for name in (METRICS, EVENTS):
            self._files[name] = os.open(self._dir / name, APPEND, 0o644)
        fields = {key: value for key, value in info.items() if key != "config"}
        self.event("resume" if step else "start", **fields, **({"cut": cut} if cut else {}))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write(METRICS, {"step": step, **values})

    def event(self, kind: str, **fields: Any) -> None:
        self._write(EVENTS, stamped(kind, fields))

    def artifact(self, path: Path) -> None:
        """Artifacts are in the run's folder already."""

    def rewind(self, step: int) -> None:
        os.close(self._files.pop(METRICS))
        cut_after(self._dir / METRICS, step)
        self._files[METRICS] = os.open(self._dir / METRICS, APPEND, 0o644)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        append(self._files[name], line_of(record))


def stamped(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """An event with its time, UTC."""
    return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **fields}


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON."""
    return (json.dumps(valid(record), allow_nan=False, default=str) + "\n").encode()


def append_event(run_dir: Path, kind: str, **fields: Any) -> None:
    """Appends to events.jsonl by itself, for whoever is not sure that the trackers still work."""
    file = os.open(run_dir / EVENTS, APPEND, 0o644)
    try:
        append(file, line_of(stamped(kind, fields)))
    finally:
        os.close(file)


def append(file: int, data: bytes) -> None:
    """One write to a descriptor: what a killed process wrote is complete. Raises OSError when the disk is full."""
    written = os.write(file, data)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes written, is the disk full?")


def valid(value: Any) -> Any:
    """`value` with floats that are not finite as strings, and NumPy or JAX scalars as Python numbers."""
    if isinstance(value, Mapping):
        return {str(key): valid(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [valid(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(line, its object) of a JSON-lines file that may end in a broken line, or not exist; None for a broken one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            yield line, record if isinstance(record, dict) else None


def furthest(run_dir: Path) -> int:
    """The largest step that a run in this folder ever began, as far as its files tell."""
    steps = [record.get("step", 0) for _, record in read_lines(run_dir / METRICS) if record]
    events = [event for _, event in read_lines(run_dir / EVENTS) if event]
    steps += [event.get(name, 0) for event in events for name in ("step", "reached")]
    return max((step for step in steps if isinstance(step, int)), default=0)


def cut_after(path: Path, step: int | None) -> int:
    """Removes broken lines and, unless None, those of steps after `step`; returns how many of the latter.

    The file is replaced at once, so that a kill leaves the old or the new one.
    """

    def later(record: dict[str, Any]) -> bool:
        return step is not None and record.get("step", 0) > step

    bad = cut = 0
    for _, record in read_lines(path):
        bad, cut = bad + (record is None), cut + (record is not None and later(record))
    if bad or cut:
        fresh = path.with_name(path.name + ".new")
        with fresh.open("wb") as file:
            file.writelines(line for line, record in read_lines(path) if record is not None and not later(record))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    return cut


def trackers(config: Config, run_dir: Path, is_main: bool) -> list[Tracker]:
    """The trackers that the config asks for; none on processes other than 0.

    Raises:
        UserError: a tracker whose package is missing, in one line with the extra to install.
    """
    from jaxtrain.observe.backends import MLflow, TensorBoard, WandB

    if not is_main:
        return []
    log = config.log
    members: list[Tracker] = [Files(run_dir)]
    if log.tensorboard:
        members.append(TensorBoard(run_dir))
    if log.wandb is not None:
        members.append(WandB(log.wandb, config.name, run_dir))
    if log.mlflow is not None:
        members.append(MLflow(log.mlflow, config.name, run_dir))
    return members
