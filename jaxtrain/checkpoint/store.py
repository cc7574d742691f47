"""Folder of a run's checkpoints: which steps are committed, which are deleted, and what a crash left behind.

DIR/40/              a step: orbax's files and the marker jaxtrain.json, which is written last
DIR/60.orbax-...     a save in progress, or left by a killed one
DIR/60.generation-3/ the same in a launched job with a consensus store, see `FencedStore`
DIR/bad-20/          a damaged step, set aside
DIR/.trash/20.<ns>/  a step being deleted: renamed first, so that no half-deleted step is ever listed
DIR/.lock            held by the run that writes
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.files import MARKER, file_problem, read_marker
from jaxtrain.distributed.save_fence import SaveFence
from jaxtrain.errors import CheckpointError
from jaxtrain.io.atomic import fsync

TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a folder that is being written
OF_GENERATION = re.compile(r"(\d+)\.generation-(\d+)(\..*)?")  # folder in which a generation writes a step
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
    """Lists, checks and deletes the steps of one folder. Holds no state and no lock, so it is safe to read with."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser().absolute()  # orbax needs an absolute path
        self.holder = ""  # names the job of its lock's holder

    def path(self, step: int) -> Path:
        """Returns the folder of a step."""
        return self.directory / str(step)

    def writing_path(self, step: int) -> Path:
        """Returns the folder in which a step is written; `publish` gives it its final name."""
        return self.path(step)

    def publish(self, step: int) -> None:
        """Makes a step count that is on the disk; here its marker does."""

    def open(self) -> None:
        """Deletes what killed runs left. Only the holder of the lock may call it."""
        self.clean()

    def discard(self, step: int) -> None:
        """Deletes a step that failed although it may have its marker."""
        if self.path(step).exists():
            self.delete(str(step))

    def folders(self) -> list[int]:
        """Lists the steps that have a folder, committed or not, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(name) for name in os.listdir(self.directory) if name.isdecimal())

    def marked(self) -> list[int]:
        """Lists the steps that have a marker, intact or damaged, ascending."""
        return [step for step in self.folders() if (self.path(step) / MARKER).exists()]

    def aside(self) -> list[tuple[int, str]]:
        """Lists (step, folder name) of steps that were set aside, ascending."""
        names = os.listdir(self.directory) if self.directory.is_dir() else ()
        matches = (_ASIDE.fullmatch(name) for name in names if (self.directory / name).is_dir())
        return sorted((int(match[2]), match[0]) for match in matches if match)

    def steps(self) -> list[StepInfo]:
        """Lists the committed steps (valid marker), ascending. Does not read their files, see `problem`."""
        infos = []
        for step in self.marked():
            try:
                content = self.read(step)
            except (CheckpointError, OSError):
                continue  # damaged or just deleted, so not committed; `restore` reports a damaged one
            infos.append(StepInfo(step, self.path(step), content["metrics"] or {}, content["bytes"], content["time"]))
        return infos

    def latest(self) -> int | None:
        """Returns the newest committed step, or None."""
        steps = self.steps()
        return steps[-1].step if steps else None

    def read(self, step: int) -> dict[str, Any]:
        """Returns the content of a step's marker. Raises FileNotFoundError or CheckpointError, see `read_marker`."""
        content = read_marker(self.path(step))
        if content["step"] != step:
            raise CheckpointError(f"{MARKER} is of step {content['step']}: the folder was renamed or copied")
        return content

    def marker(self, step: int) -> dict[str, Any]:
        """Returns the content of a step's marker. Raises CheckpointError, which names the step and the folder."""
        try:
            return self.read(step)
        except FileNotFoundError:
            raise CheckpointError(self.missing(step)) from None
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {step} in {self.directory} is damaged: {error}") from None

    def missing(self, step: int) -> str:
        """Describes that a step does not exist, and which ones do."""
        steps = ", ".join(str(info.step) for info in self.steps()) or "none"
        return f"no checkpoint {step} in {self.directory}; it has {steps}"

    def is_deleted(self, step: int) -> bool:
        """Returns whether a step has no marker any more. Opens it, because names and attributes may be cached."""
        try:
            self.read(step)
        except FileNotFoundError:
            return True
        except CheckpointError:
            return False
        except OSError as error:
            return error.errno == errno.ESTALE
        return False

    def problem(
        self, step: int, share: tuple[int, int] = (0, 1), check: Callable[..., str | None] = file_problem
    ) -> str | None:
        """Describes the first problem of a step, or returns None.

        Args:
          share: (index, count): checks the files at index, index + count, ... by descending size.
          check: check of a file: `file_problem` reads every byte, `size_problem` none.
        """
        try:
            content = self.read(step)
        except FileNotFoundError:
            return f"{MARKER} is missing"
        except (CheckpointError, OSError) as error:
            return str(error)
        index, count = share
        files = largest_first(content["files"])[index::count]
        problems = (check(self.path(step), name, expected) for name, expected in files)
        return next(filter(None, problems), None)

    def set_aside(self, step: int, prefix: str) -> Path:
        """Renames a step to PREFIX-N (PREFIX-N.1, ... if that exists) and returns the new path."""
        target, count = self.directory / f"{prefix}-{step}", 0
        while target.exists():
            count += 1
            target = self.directory / f"{prefix}-{step}.{count}"
        os.rename(self.path(step), target)
        fsync(self.directory)
        return target

    def set_aside_after(self, step: int) -> dict[int, Path]:
        """Renames the steps after one to `old-N`, the newest first: what is left is always the beginning of the run.

        Returns:
            step -> its new path, ascending.
        """
        later = [marked for marked in self.marked() if marked > step]
        moved = {abandoned: self.set_aside(abandoned, "old") for abandoned in reversed(later)}
        return dict(sorted(moved.items()))

    def delete(self, *names: str) -> None:
        """Deletes entries of the folder: renames each into .trash (atomic), then empties .trash."""
        trash = self.directory / ".trash"
        trash.mkdir(exist_ok=True)
        for name in names:
            os.rename(self.directory / name, trash / f"{name}.{time.time_ns()}")
        if names:
            fsync(self.directory)
        for entry in trash.iterdir():
            _delete(entry)

    def clean(self, step: int | None = None) -> None:
        """Deletes the remains of killed or failed saves: temporaries, half-deleted steps, steps without marker.

        With `step`, only the remains of that step. Only the holder of the lock may call it.
        """
        self.delete(*(name for name in os.listdir(self.directory) if self._is_remains(name, step)))

    def _is_remains(self, name: str, step: int | None) -> bool:
        """Returns whether an entry of the folder is left of a save, of any step if `step` is None."""
        is_unmarked = name.isdecimal() and not (self.directory / name / MARKER).exists()
        is_remains = is_unmarked or TEMPORARY in name or OF_GENERATION.fullmatch(name) is not None
        return is_remains and (step is None or name.split(".")[0] == str(step))

    def delete_abandoned(self) -> None:
        """Deletes the steps that a rewind has set aside, once a step as late as theirs is committed again."""
        newest = max(self.marked(), default=-1)
        self.delete(*(name for step, name in self.aside() if name.startswith("old-") and step <= newest))

    def prune(self, retention: Retention, held: Collection[int] = frozenset()) -> list[int]:
        """Deletes the `steps_beyond_limit` except those in `held`. Returns the deleted steps."""
        steps = [step for step in steps_beyond_limit(self.steps(), retention) if step not in held]
        self.delete(*map(str, steps))
        return steps


class FencedStore(CheckpointStore):
    """Folder of a launched job with a consensus store: a save counts only while its generation is the newest one.

    A generation writes step N to DIR/N.generation-G, in which no other one writes. When the files are on the disk, it
    records the save in the store, which refuses it if a newer generation has started, and then renames the folder to
    DIR/N. A process that was stopped meanwhile, and wakes after its job has gone on elsewhere, changes no checkpoint
    that counts.
    """

    def __init__(self, directory: str | os.PathLike[str], fence: SaveFence) -> None:
        """Creates the store of a generation that has the right to save."""
        super().__init__(directory)
        self._fence, self.holder = fence, f" of the launched job {fence.prefix}"

    def writing_path(self, step: int) -> Path:
        """Returns the folder in which this generation writes a step."""
        return self.directory / f"{step}.generation-{self._fence.generation}"

    def publish(self, step: int) -> None:
        """Records a step that is on the disk, and gives it its final name.

        Raises:
            FencedError: a newer generation has started.
            StoreError: the store does not answer.
        """
        folder = self.writing_path(step)
        self._fence.record(step, folder.name)
        self._rename(folder, step)

    def open(self) -> None:
        """Finishes a save that an earlier generation recorded but did not rename, then deletes what it left.

        Raises:
            StoreError: the store does not answer within `STORE_TIMEOUT`.
        """
        if (saved := self._fence.last_save()) is not None:
            step, name = saved
            if (self.directory / name / MARKER).exists() and not (self.path(step) / MARKER).exists():
                self._rename(self.directory / name, step)
        self.clean()

    def discard(self, step: int) -> None:
        """Deletes what this generation has written of a step that failed."""
        if self.writing_path(step).exists():
            self.delete(self.writing_path(step).name)

    def _rename(self, folder: Path, step: int) -> None:
        # Another process may have done it, because the record allows it to all.
        with suppress(FileNotFoundError):
            os.rename(folder, self.path(step))
        fsync(self.directory)

    def _is_remains(self, name: str, step: int | None) -> bool:
        match = OF_GENERATION.fullmatch(name)
        if match is None:
            return super()._is_remains(name, step)
        generation = int(match[2])
        if step is not None:
            return int(match[1]) == step and generation == self._fence.generation
        return generation <= self._fence.generation


@dataclass
class Retention:
    """Checkpoints that stay when others are deleted.

    Attributes:
        keep: number of newest ones, at least 1.
        keep_best: number of further ones, best in metric `best` first.
        best: name of the metric.
        is_larger_better: the best are the largest, not the lowest.
    """

    keep: int = 3
    keep_best: int = 0
    best: str | None = None
    is_larger_better: bool = False

    def ranked(self, steps: Sequence[StepInfo]) -> list[StepInfo]:
        """Returns the steps with a finite metric, the best first."""
        found = [info for info in steps if self.best is not None and _is_finite(info.metrics.get(self.best))]
        sign = -1 if self.is_larger_better else 1
        return sorted(found, key=lambda info: (sign * info.metrics[self.best or ""], info.step))


def steps_beyond_limit(steps: Sequence[StepInfo], retention: Retention) -> list[int]:
    """Returns the steps that do not stay.

    The newest always stays; a metric that is absent or not finite never counts as best.
    """
    kept = {info.step for info in steps[-max(retention.keep, 1) :]}
    kept |= {info.step for info in retention.ranked(steps)[: retention.keep_best]}
    return [info.step for info in steps if info.step not in kept]


def largest_first(files: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns (name, [size, digest]) of a marker's files, largest first."""
    return sorted(files.items(), key=lambda item: (-item[1][0], item[0]))


def _delete(entry: Path) -> None:
    """Deletes a file or a folder, but for files that someone reads.

    NFS keeps those in their folder under another name until they are closed; the next call deletes them. It may also
    list for a while what is gone.
    """
    try:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY, errno.ENOENT, errno.ESTALE):
            raise


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_manifest(directory: str | os.PathLike[str], step: int | None = None) -> tuple[int, dict[str, Any]]:
    """Returns (step, manifest) of a committed step, by default the newest.

    Raises CheckpointError if there is none or its marker is damaged.
    """
    store = CheckpointStore(directory)
    newest = store.latest() if step is None else step
    if newest is None:
        raise CheckpointError(f"no checkpoint in {store.directory}")
    return newest, store.marker(newest)["manifest"]
