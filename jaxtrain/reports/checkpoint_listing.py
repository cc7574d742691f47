"""Listing of a checkpoint folder: every step and its state. Takes no lock and changes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jaxtrain.checkpoint.files import MARKER, read_marker, size_problem
from jaxtrain.checkpoint.store import CheckpointStore, Retention, steps_beyond_limit
from jaxtrain.errors import CheckpointError
from jaxtrain.reports.layout_table import format_bytes

TITLES = ("step", "time", "size", "state", "metrics", "written by")
GOOD, DAMAGED, ASIDE, UNFINISHED = "good", "damaged", "set aside", "unfinished"
_BITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class CheckpointRow:
    """One step of a checkpoint folder.

    Attributes:
      name: name of the folder: the step, or `bad-N` or `old-N` if it was set aside.
      state: `good` by its marker and file sizes (`verify` reads every byte), `damaged`, `set aside`, or
        `unfinished`: without a marker, either being written or left by a killed run.
      reason: why it is damaged.
      content: content of the marker; empty if it is missing or unreadable.
    """

    name: str
    step: int
    state: str
    reason: str = ""
    content: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the row for `--json`."""
        manifest = self.content.get("manifest", {})
        recorded = {key: self.content.get(key) for key in ("time", "bytes", "metrics")}
        writers = {key: manifest.get(key) for key in ("processes", "devices", "mesh")}
        return {"name": self.name, "step": self.step, "state": self.state, "reason": self.reason, **recorded, **writers}


def list_checkpoints(store: CheckpointStore) -> list[CheckpointRow]:
    """Lists all steps of a folder, ascending, then the folders that were set aside."""
    rows = [_row(store, step) for step in store.folders()]
    return rows + [CheckpointRow(name, step, ASIDE, content=_content(store, name)) for step, name in store.aside()]


def _row(store: CheckpointStore, step: int) -> CheckpointRow:
    content = _content(store, str(step))
    if not (store.path(step) / MARKER).exists():
        return CheckpointRow(str(step), step, UNFINISHED)
    problem = store.problem(step, check=size_problem)
    return CheckpointRow(str(step), step, DAMAGED if problem else GOOD, problem or "", content)


def _content(store: CheckpointStore, name: str) -> dict[str, Any]:
    try:
        return read_marker(store.directory / name)
    except (CheckpointError, OSError):
        return {}


def tensor_bytes(shape: list[int], dtype: str) -> int:
    """Returns the bytes of a tensor, by the name of its dtype such as `float32`, `float8_e4m3fn` or `bool`."""
    bits = _BITS.search(dtype)
    return math.prod(shape) * (max(int(bits[1]) // 8, 1) if bits else 1)


def steps_to_prune(store: CheckpointStore, keep: int | None, steps: Collection[int]) -> list[int]:
    """Returns the steps to delete, ascending: `steps`, and all but the newest `keep`.

    With `keep`, the best checkpoints stay too if the run's config says so (`checkpoint.keep_best`). `keep` does not
    count steps whose marker is damaged; they are deleted only if `steps` has them.

    Raises:
        CheckpointError: a step does not exist, or `keep` is less than 1.
    """
    existing = store.folders()
    for step in steps:
        if step not in existing:
            steps_there = ", ".join(map(str, existing)) or "none"
            raise CheckpointError(f"no checkpoint {step} in {store.directory}; it has {steps_there}")
    chosen = set(steps)
    if keep is not None:
        if keep < 1:
            raise CheckpointError(f"expected --keep of at least 1; found {keep}")
        complete = store.steps()
        chosen |= set(steps_beyond_limit(complete, _retention(store, complete[-1].step if complete else -1, keep)))
    return sorted(chosen)


def _retention(store: CheckpointStore, step: int, keep: int) -> Retention:
    """Returns what stays besides the newest: as a callback says in a step's manifest, else the config there."""
    try:
        manifest = _content(store, str(step))["manifest"]
        options = manifest["config"]["checkpoint"]
        own = manifest.get("retention") or {"keep_best": options["keep_best"], "best": options["best_metric"]}
        return Retention(keep, int(own["keep_best"]), str(own["best"]), bool(own.get("is_larger_better")))
    except (KeyError, TypeError, ValueError):
        return Retention(keep)


def newest_intact(store: CheckpointStore, excluded: Collection[int]) -> int | None:
    """Returns the newest step outside of `excluded` whose every byte is intact, or None."""
    for step in reversed(store.marked()):
        if step not in excluded and store.problem(step) is None:
            return step
    return None


def checkpoint_cells(row: CheckpointRow) -> list[str]:
    """Returns step, time, size, state, metrics and writers of a step as text."""
    content = row.content
    time = f"{datetime.fromtimestamp(content['time']):%Y-%m-%d %H:%M:%S}" if content else ""
    recorded: dict[str, float] = content.get("metrics") or {}
    metrics = " ".join(f"{name} {value:.5g}" for name, value in recorded.items())
    state = f"{row.state}: {row.reason}" if row.reason else row.state
    stored = format_bytes(content["bytes"]) if content else ""
    return [row.name, time, stored, state, metrics, writers(content.get("manifest", {}))]


def writers(manifest: dict[str, Any]) -> str:
    """Returns e.g. `2 processes, data 2 x fsdp 4`; empty if it is not recorded."""
    processes = manifest.get("processes")
    if processes is None:
        return ""
    sizes = manifest.get("mesh")
    mesh = " x ".join(f"{axis} {count}" for axis, count in sizes.items()) if isinstance(sizes, dict) else ""
    return f"{processes} process{'es' if processes != 1 else ''}, {mesh or '1 device'}"
