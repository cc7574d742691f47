"""Trackers: where metrics and events of a run go. No JAX.

A tracker is told what happens; it never decides anything, and one that fails never stops training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.trackers.files import JsonlTracker


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


class TrackerList:
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
        self._each("event", kind, among=JsonlTracker, **fields)

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
