"""Trackers, which receive the metrics and events of a run: interface, list, and those of a config.

A tracker never influences training, and one that fails does not stop it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxtrain.config.schema import LogConfig
from jaxtrain.config.user_class import make_object
from jaxtrain.io.jsonl import PostponedError
from jaxtrain.trackers.files import JsonlTracker

PROJECT = "jaxtrain"  # default project or experiment


class Histogram(NamedTuple):
    """Histogram of an array's finite values.

    Attributes:
        counts: number of values in each bin.
        edges: edges of the bins, one more.
        sum: sum of the values.
        sum_squares: sum of their squares.
        not_finite: number of values that are not finite, which no bin has.
    """

    counts: np.ndarray
    edges: np.ndarray
    sum: float
    sum_squares: float
    not_finite: int


class Tracker(Protocol):
    """Receives metrics and events. Only process 0 has trackers.

    One that shows histograms has a method `histograms(step, {name: Histogram})`, too.
    """

    def start(self, info: Mapping[str, Any]) -> None:
        """Starts the run, or resumes it after `info["step"]` finished steps (0: a new run).

        Other keys, all optional: `name`, `steps`, `config` (resolved, a plain dict), `unigram_entropy` (nats per
        token), `flops` and `peak` (as texts), `mesh`, `versions`...
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs host values after `step` finished steps."""

    def event(self, kind: str, **fields: Any) -> None:
        """Logs an event such as save, eval or stop, with `step` and other fields."""

    def artifact(self, path: Path) -> None:
        """Stores a file or folder with the run, such as the loss plot or a checkpoint."""

    def rewind(self, step: int) -> None:
        """Discards the values of steps after `step`, because training continues from there."""

    def close(self) -> None:
        """Ends the run, also after an error."""


class TrackerList:
    """Forwards all calls to several trackers. A tracker that raises is dropped and reported in one line.

    It stays if it only postpones what it writes, see `PostponedError`.
    """

    def __init__(self, members: Iterable[Tracker], report: Callable[[str], None] = print):
        self.members, self._report = list(members), report

    def start(self, info: Mapping[str, Any]) -> None:
        """Reports the begin of a run or of its continuation."""
        self._each("start", info)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._each("log", step, values)

    def event(self, kind: str, **fields: Any) -> None:
        """Reports an event."""
        self._each("event", kind, **fields)

    def record(self, kind: str, **fields: Any) -> None:
        """Writes an event to files only, for `jaxtrain report`. Thread-safe."""
        self._each("event", kind, among=JsonlTracker, **fields)

    def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
        """Logs histograms in the trackers that show them."""
        self._each("histograms", step, values)

    def artifact(self, path: Path) -> None:
        """Uploads a file or folder to the trackers that store them."""
        self._each("artifact", path)

    def rewind(self, step: int) -> None:
        """Drops what was logged after a step."""
        self._each("rewind", step)

    def close(self) -> None:
        """Closes all trackers."""
        self._each("close")

    def _each(self, method: str, *args: Any, among: type = object, **kwargs: Any) -> None:
        for member in [member for member in self.members if isinstance(member, among)]:
            if not hasattr(member, method):  # a user's own tracker takes what it wants
                continue
            try:
                getattr(member, method)(*args, **kwargs)
            except PostponedError as error:
                self._report(f"tracker {type(member).__name__}: {error}")
            except Exception as error:  # training continues after any error of a disk, a network or a library
                if member not in self.members:
                    return  # another thread has dropped it
                self.members.remove(member)
                reason = " ".join(str(error).split()) or type(error).__name__
                name = type(member).__name__
                self._report(f"tracker {name} dropped, training continues: {method}: {reason[:200]}")


def build_trackers(log: LogConfig, name: str, run_dir: Path, is_main: bool) -> list[Tracker]:
    """Creates the trackers of the config; none on processes other than 0.

    Args:
        log: the `log` section.
        name: name of the run.
        run_dir: run directory.
        is_main: True on process 0.

    Returns:
        the trackers.

    Raises:
        UserError: the package of a tracker is missing; names the extra to install. Or a user's own fails.
    """
    from jaxtrain.trackers.mlflow import MLflowTracker
    from jaxtrain.trackers.tensorboard import TensorBoardTracker
    from jaxtrain.trackers.wandb import WandbTracker

    if not is_main:
        return []
    members: list[Tracker] = [JsonlTracker(run_dir)]
    if log.tensorboard:
        members.append(TensorBoardTracker(run_dir))
    if log.wandb:
        members.append(WandbTracker(os.environ.get("WANDB_PROJECT", PROJECT), name, run_dir))
    if log.mlflow:
        members.append(MLflowTracker(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), name, run_dir))
    given = {"name": name, "run_dir": run_dir}
    for index, plugin in enumerate(log.trackers):
        members.append(make_object(f"log.trackers.{index}", plugin.type, plugin.options, "trackers", given))
    return members
