"""The folder of a run's checkpoints: which steps are whole, which go, what a crash left behind.

DIR/40/              a step: orbax's files and, last, the marker jaxtrain.json
DIR/60.orbax-...     a save in flight, or litter of a killed one
DIR/bad-20/          a damaged step, set aside
DIR/.trash/20.<ns>/  a step being deleted: renamed first, so that no half-deleted step is ever listed
DIR/.lock            held by the one writing run
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.files import MARKER, problem_of, read_marker, size_problem
from jaxtrain.errors import CheckpointError
from jaxtrain.io.atomic import fsync

TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of what is being written
_ASIDE = re.compile(r"(bad|old)-(\d+)(\.\d+)?")


@dataclass(frozen=True)
class StepInfo:
    """A committed step: its metrics, its bytes on disk and its commit time (Unix seconds)."""

    step: int
    path: Path
    metrics: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    time: float = 0.0


class CheckpointStore:
    """Reads and tidies one folder of checkpoints. It opens nothing and holds no state, so that anyone may look."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser().absolute()  # orbax takes no relative path

    def path(self, step: int) -> Path:
        """Folder of a step."""
        return self.directory / str(step)

    def folders(self) -> list[int]:
        """Step folders, committed or not, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(name) for name in os.listdir(self.directory) if name.isdecimal())

    def marked(self) -> list[int]:
        """Steps that have a marker, whole or damaged, ascending."""
        return [step for step in self.folders() if (self.path(step) / MARKER).exists()]

    def aside(self) -> list[tuple[int, str]]:
        """(step, name of the folder) of what was set aside, ascending."""
        names = os.listdir(self.directory) if self.directory.is_dir() else ()
        found = (_ASIDE.fullmatch(name) for name in names if (self.directory / name).is_dir())
        return sorted((int(one[2]), one[0]) for one in found if one)

    def steps(self) -> list[StepInfo]:
        """Committed steps (valid marker), ascending. Their files are not read: `problems` does that."""
        found = []
        for step in self.marked():
            try:
                content = self.read(step)
            except (CheckpointError, OSError):
                continue  # damaged or just deleted: not committed; restore names it and sets it aside
            found.append(StepInfo(step, self.path(step), content["metrics"] or {}, content["bytes"], content["time"]))
        return found

    def latest(self) -> int | None:
        """Newest committed step, or None."""
        steps = self.steps()
        return steps[-1].step if steps else None

    def read(self, step: int) -> dict[str, Any]:
        """Content of a step's marker. Raises FileNotFoundError or CheckpointError, see `files.read_marker`."""
        content = read_marker(self.path(step))
        if content["step"] != step:
            raise CheckpointError(f"{MARKER} is of step {content['step']}: the folder was renamed or copied")
        return content

    def marker(self, step: int) -> dict[str, Any]:
        """Content of a step's marker. Raises CheckpointError naming the step when absent or damaged."""
        try:
            return self.read(step)
        except FileNotFoundError:
            have = ", ".join(str(info.step) for info in self.steps()) or "none"
            raise CheckpointError(f"no checkpoint {step} in {self.directory}: there is {have}") from None
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {step} in {self.directory} is damaged: {error}") from None

    def problem(self, step: int, share: tuple[int, int] = (0, 1)) -> str | None:
        """The first thing that is wrong with a step, in words, or None: its marker and every byte of its files.

        Args:
          share: (index, count): this process reads the files at index, index + count, ... by descending size.
        """
        return next(self.problems(step, share), None)

    def problems(
        self, step: int, share: tuple[int, int] = (0, 1), read: Callable[[int], object] = lambda size: None
    ) -> Iterator[str]:
        """Returns the problems of a step; `read` is told the bytes of each file after it was read."""
        try:
            content = self.read(step)
        except FileNotFoundError:
            yield f"{MARKER} is missing"
        except (CheckpointError, OSError) as error:
            yield str(error)
        else:
            index, count = share
            for name, expected in by_size(content["files"])[index::count]:
                if problem := problem_of(self.path(step), name, expected):
                    yield problem
                read(expected[0])

    def quick_problem(self, step: int) -> str | None:
        """Returns the problem that the marker and the file sizes of a step show, or None."""
        try:
            files = self.read(step)["files"].items()
        except FileNotFoundError:
            return f"{MARKER} is missing"
        except (CheckpointError, OSError) as error:
            return str(error)
        problems = (size_problem(self.path(step), name, expected) for name, expected in files)
        return next((problem for problem in problems if problem), None)

    def set_aside(self, step: int, prefix: str) -> Path:
        """Renames a step to PREFIX-N (PREFIX-N.1, ... when that exists) and returns the new path."""
        target, count = self.directory / f"{prefix}-{step}", 0
        while target.exists():
            count += 1
            target = self.directory / f"{prefix}-{step}.{count}"
        os.rename(self.path(step), target)
        fsync(self.directory)
        return target

    def delete(self, *names: str) -> None:
        """Deletes entries of the folder: renames each into .trash (atomic), then removes what is there."""
        trash = self.directory / ".trash"
        trash.mkdir(exist_ok=True)
        for name in names:
            os.rename(self.directory / name, trash / f"{name}.{time.time_ns()}")
        if names:
            fsync(self.directory)
        for entry in trash.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def clean(self, step: int | None = None) -> list[str]:
        """Deletes what killed or failed saves left: temporaries, half-deleted steps, steps without marker.

        With `step`, only that step's leavings. Returns the names. Only the holder of the lock may call it.
        """
        litter = [
            name
            for name in os.listdir(self.directory)
            if (name.isdecimal() and not (self.directory / name / MARKER).exists()) or TEMPORARY in name
        ]
        if step is not None:
            litter = [name for name in litter if name.split(".")[0] == str(step)]
        self.delete(*litter)
        return litter

    def prune(
        self, keep: int, keep_best: int = 0, best: str | None = None, held: Collection[int] = frozenset()
    ) -> list[int]:
        """Deletes what `surplus` names, but for the steps `held`. Returns the deleted steps."""
        gone = [step for step in surplus(self.steps(), keep, keep_best, best) if step not in held]
        self.delete(*map(str, gone))
        return gone


def surplus(steps: Sequence[StepInfo], keep: int, keep_best: int = 0, best: str | None = None) -> list[int]:
    """The steps beyond the newest `keep` and the `keep_best` lowest in metric `best`.

    The newest always stays; a metric that is absent or not finite never counts as best.
    """
    kept = {info.step for info in steps[-max(keep, 1) :]}
    ranked = [info for info in steps if best is not None and _finite(info.metrics.get(best))]
    ranked.sort(key=lambda info: (info.metrics[best or ""], info.step))
    kept |= {info.step for info in ranked[:keep_best]}
    return [info.step for info in steps if info.step not in kept]


def by_size(files: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name, [size, digest]) of a marker's files, largest first."""
    return sorted(files.items(), key=lambda item: (-item[1][0], item[0]))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_manifest(directory: str | os.PathLike[str], step: int | None = None) -> tuple[int, dict[str, Any]]:
    """(step, manifest) of a committed step, the newest by default. Imports no JAX.

    Raises CheckpointError when there is none or its marker is damaged.
    """
    store = CheckpointStore(directory)
    chosen = store.latest() if step is None else step
    if chosen is None:
        raise CheckpointError(f"no checkpoint in {store.directory}")
    return chosen, store.marker(chosen)["manifest"]
