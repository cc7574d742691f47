"""What lies in a folder of checkpoints, for people: every step and its state. No JAX, no lock, nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.checkpoint.files import MARKER, read_marker
from jaxtrain.checkpoint.store import Store, surplus
from jaxtrain.errors import CheckpointError

GOOD, DAMAGED, ASIDE, UNFINISHED = "good", "damaged", "set aside", "unfinished"
_BITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Row:
    """A folder of a step.

    Attributes:
      name: of the folder: the step, or `bad-N` and `old-N` where it was set aside.
      state: `good` as far as marker and sizes tell (`verify` reads every byte), `damaged`, `set aside`, or
        `unfinished`: without a marker, being written right now or left by a killed run.
      reason: why it is damaged.
      content: of the marker; empty where there is none that can be read.
    """

    name: str
    step: int
    state: str
    reason: str = ""
    content: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What a machine may want to know."""
        manifest = self.content.get("manifest", {})
        known = {key: self.content.get(key) for key in ("time", "bytes", "metrics")}
        wrote = {key: manifest.get(key) for key in ("processes", "devices", "mesh")}
        return {"name": self.name, "step": self.step, "state": self.state, "reason": self.reason, **known, **wrote}


def survey(store: Store) -> list[Row]:
    """All steps of a folder, ascending, then what was set aside."""
    rows = [_row(store, step) for step in store.folders()]
    return rows + [Row(name, step, ASIDE, content=_content(store, name)) for step, name in store.aside()]


def _row(store: Store, step: int) -> Row:
    content = _content(store, str(step))
    if not (store.path(step) / MARKER).exists():
        return Row(str(step), step, UNFINISHED)
    problem = store.quick_problem(step)
    return Row(str(step), step, DAMAGED if problem else GOOD, problem or "", content)


def _content(store: Store, name: str) -> dict[str, Any]:
    try:
        return read_marker(store.directory / name)
    except (CheckpointError, OSError):
        return {}


def tensor_bytes(shape: list[int], dtype: str) -> int:
    """Bytes of a tensor by the name of its dtype: `float32`, `bfloat16`, `float8_e4m3fn`, `bool`..."""
    bits = _BITS.search(dtype)
    size = max(int(bits[1]) // 8, 1) if bits else 1
    for dim in shape:
        size *= dim
    return size


def chosen(store: Store, keep: int | None, steps: Collection[int]) -> list[int]:
    """The steps that `prune` is asked to delete, ascending: those named, and all beyond the newest `keep`.

    With `keep`, the best ones stay that the run's own config keeps (`checkpoint.keep_best`). Steps whose marker is
    damaged are not counted by `keep`; they go when they are named.

    Raises CheckpointError: a step named is not there, or `keep` is less than 1.
    """
    have = store.folders()
    for step in steps:
        if step not in have:
            raise CheckpointError(f"no checkpoint {step} in {store.directory}: there is {_listed(have)}")
    gone = set(steps)
    if keep is not None:
        if keep < 1:
            raise CheckpointError(f"expected --keep of at least 1; found {keep}")
        known = store.steps()
        gone |= set(surplus(known, keep, *_best(store, known[-1].step if known else -1)))
    return sorted(gone)


def _best(store: Store, step: int) -> tuple[int, str | None]:
    """`checkpoint.keep_best` and `checkpoint.best` of the config in a step's manifest."""
    try:
        options = _content(store, str(step))["manifest"]["config"]["checkpoint"]
        return int(options["keep_best"]), str(options["best"])
    except (KeyError, TypeError, ValueError):
        return 0, None


def last_good(store: Store, gone: Collection[int]) -> int | None:
    """The newest step outside of `gone` whose every byte is good, or None."""
    for step in reversed(store.marked()):
        if step not in gone and store.problem(step) is None:
            return step
    return None


def _listed(steps: Collection[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
