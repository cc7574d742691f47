"""Durable tier: complete copies of steps in another folder or in an object store.

A step exists there if it has a marker. In a folder it is written under a temporary name, read back and renamed. An
object store cannot rename, so the marker is written last, after every other file was read back.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain.checkpoint.events import CopyFailed, Event, Fetched, SetAside
from jaxtrain.checkpoint.files import (
    MARKER,
    digest,
    digest_problem,
    failure_reason,
    file_problem,
    fsync_folders,
    parse_marker,
)
from jaxtrain.checkpoint.store import TEMPORARY, CheckpointStore
from jaxtrain.errors import CheckpointError
from jaxtrain.io.atomic import fsync, open_atomic, write_atomic
from jaxtrain.io.packages import import_optional


class DurableTier(ABC):
    """Storage for copies of the steps of one run. Every method may raise what its storage raises."""

    location: str

    @abstractmethod
    def steps(self) -> list[int]:
        """Lists the steps that have a marker, ascending."""

    @abstractmethod
    def marker(self, step: int) -> bytes:
        """Returns the bytes of a marker."""

    @abstractmethod
    def open(self, step: int, name: str) -> BinaryIO:
        """Opens a file of a step for reading."""

    @abstractmethod
    def delete(self, *steps: int) -> None:
        """Deletes steps; a half-deleted one is not listed."""

    @abstractmethod
    def set_aside(self, step: int) -> None:
        """Removes a step from the list."""

    @abstractmethod
    def clean(self) -> None:
        """Deletes the remains of killed or failed copies. Not to be called during a copy."""

    @abstractmethod
    def _write(self, step: int, source: Path, marker: bytes, files: dict[str, Any]) -> None:
        """Copies the files of a step, reads the copy back and commits it."""

    def content(self, step: int) -> dict[str, Any]:
        """Returns the content of a step's marker. Raises CheckpointError if it is damaged."""
        content = parse_marker(self.marker(step))
        if content["step"] != step:
            raise CheckpointError(f"{MARKER} is of step {content['step']}")
        return content

    def file_problem(self, step: int, name: str, expected: list[Any]) -> str | None:
        """Describes what is wrong with a file, or returns None. Reads every byte."""
        try:
            with self.open(step, name) as source:
                return digest_problem(name, digest(source), expected)
        except FileNotFoundError:
            return f"{name} is missing"

    def put(self, step: int, source: Path) -> int:
        """Copies a complete step from a folder, unless it is here already. Returns its bytes."""
        marker = (source / MARKER).read_bytes()
        content = parse_marker(marker)
        if not self._has(step, marker, content["files"]):
            self._write(step, source, marker, content["files"])
        return content["bytes"]

    def _has(self, step: int, marker: bytes, files: dict[str, Any]) -> bool:
        """Returns whether the tier has a step with this very marker and every byte intact."""
        if step not in self.steps() or self.marker(step) != marker:
            return False
        return not any(self.file_problem(step, name, expected) for name, expected in files.items())


def open_tier(location: str) -> DurableTier:
    """Returns the tier at a folder or at a URL of fsspec. Reads and creates nothing yet.

    Raises DataError if the package for the URL is missing.
    """
    location = location.removeprefix("file://")
    return ObjectStoreTier(location) if "://" in location else FolderTier(Path(os.path.expanduser(location)))


def run_location(durable: str | None, run_dir: Path) -> str | None:
    """Returns the location of a run's copies: `checkpoint.durable` and the name of the run's folder."""
    return None if durable is None else f"{durable.rstrip('/')}/{Path(os.path.abspath(run_dir)).name}"


def fetch_step(tier: DurableTier, step: int, store: CheckpointStore) -> None:
    """Copies a step of a tier into the run's folder, checking every byte; it appears there complete or not at all.

    Raises CheckpointError if the step is damaged, and what the storage raises.
    """
    marker, files = tier.marker(step), tier.content(step)["files"]
    with _new_step(store, step, marker, files) as folder:
        for name, expected in files.items():
            with tier.open(step, name) as source, open_atomic(folder / name) as target:
                if problem := digest_problem(name, digest(source, target), expected):
                    raise CheckpointError(problem)


class FolderTier(DurableTier):
    """Durable tier in a folder of a mounted disk."""

    def __init__(self, path: Path) -> None:
        self._store = CheckpointStore(path)
        self.location = str(self._store.directory)

    def steps(self) -> list[int]:
        return self._store.marked()

    def marker(self, step: int) -> bytes:
        return (self._store.path(step) / MARKER).read_bytes()

    def open(self, step: int, name: str) -> BinaryIO:
        return open(self._store.path(step) / name, "rb")

    def _write(self, step: int, source: Path, marker: bytes, files: dict[str, Any]) -> None:
        self._store.directory.mkdir(parents=True, exist_ok=True)
        self._store.clean(step)
        with _new_step(self._store, step, marker, files) as folder:
            for name, expected in files.items():
                with open_atomic(folder / name) as target:
                    _copy_local(source, name, target, expected)
            for name, expected in files.items():
                _raise_if_damaged(file_problem(folder, name, expected))
            if self._store.path(step).exists():  # a damaged copy, or another step with the same number
                self._store.delete(str(step))

    def delete(self, *steps: int) -> None:
        self._store.delete(*map(str, steps))

    def set_aside(self, step: int) -> None:
        self._store.set_aside(step, "old")

    def clean(self) -> None:
        self._store.clean()
        self._store.delete_abandoned()


class ObjectStoreTier(DurableTier):
    """Durable tier in an object store, through fsspec."""

    def __init__(self, url: str) -> None:
        self.location = re.sub(r"//[^/@]*@", "//", url.rstrip("/"))  # without user and password
        fsspec = import_optional("fsspec", f"checkpoint.durable {self.location}", "remote")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            text = f"checkpoint.durable {self.location}: {' '.join(str(error).split())}"
            is_missing = isinstance(error, ImportError)  # s3fs, gcsfs: the error names the package
            raise CheckpointError(text + "; install it beside 'jaxtrain[remote]'" * is_missing) from error
        self._root = root.rstrip("/")

    def steps(self) -> list[int]:
        return [step for step in self._folders() if self._fs.exists(self._path(step, MARKER))]

    def _folders(self) -> list[int]:
        self._fs.invalidate_cache()
        try:
            names = [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def marker(self, step: int) -> bytes:
        return self._fs.cat_file(self._path(step, MARKER))

    def open(self, step: int, name: str) -> BinaryIO:
        return self._fs.open(self._path(step, name), "rb")

    def _write(self, step: int, source: Path, marker: bytes, files: dict[str, Any]) -> None:
        self.delete(step)
        for name, expected in files.items():
            with self._fs.open(self._path(step, name), "wb") as target:
                _copy_local(source, name, target, expected)
        for name, expected in files.items():
            _raise_if_damaged(self.file_problem(step, name, expected))
        self._fs.pipe_file(self._path(step, MARKER), marker)

    def delete(self, *steps: int) -> None:
        for step in steps:
            if self._fs.exists(self._path(step, MARKER)):
                self._fs.rm_file(self._path(step, MARKER))
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._root}/{step}", recursive=True)

    def set_aside(self, step: int) -> None:
        self.delete(step)

    def clean(self) -> None:
        committed = self.steps()
        self.delete(*(step for step in self._folders() if step not in committed))

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{step}/{name}"


def _copy_local(source: Path, name: str, target: BinaryIO, expected: list[Any]) -> None:
    """Copies a file of the run's folder. Raises CheckpointError if it is damaged."""
    with open(source / name, "rb") as original:
        if problem := digest_problem(name, digest(original, target), expected):
            raise CheckpointError(f"{source} is damaged: {problem}")


def _raise_if_damaged(problem: str | None) -> None:
    if problem:
        raise CheckpointError(f"the copy is damaged: {problem}")


@contextlib.contextmanager
def _new_step(store: CheckpointStore, step: int, marker: bytes, files: Iterable[str]) -> Iterator[Path]:
    """Yields a temporary folder with the subfolders of `files`, then commits it as `step`."""
    folder = store.directory / f"{step}{TEMPORARY}"
    _remove(folder)
    try:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        yield folder
        write_atomic(folder / MARKER, marker)
        fsync_folders(folder)
        os.rename(folder, store.path(step))
        fsync(store.directory)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


class DurableFetcher:
    """Fetches steps of a tier for a run that restores. If the tier cannot be reached, that is an event.

    Attributes:
      fetched: steps that were fetched from the tier.
    """

    def __init__(self, store: CheckpointStore, tier: DurableTier, report: Callable[[Event], None]) -> None:
        self._store, self._tier, self._report = store, tier, report
        self._failed: set[int] = set()  # steps that could not be fetched
        self.location = tier.location
        self.fetched: set[int] = set()

    def is_empty(self) -> bool:
        """Returns whether the tier has no step. Raises CheckpointError if it cannot be listed."""
        try:
            return not self._tier.steps()
        except Exception as error:  # each store raises errors of its own classes
            raise CheckpointError(f"{self.location} cannot be listed: {failure_reason(error)}") from error

    def fetch(self, step: int | None) -> int | None:
        """Fetches `step`, or the newest good step that is newer than those in the folder. Returns it, or None."""
        local = self._store.marked()
        newest = local[-1] if local else -1
        for candidate in reversed(self._steps()):
            is_wanted = candidate > newest if step is None else candidate == step and step not in local
            if is_wanted and candidate not in self._failed and self._try_fetch(candidate):
                return candidate
        return None

    def discard_after(self, step: int) -> None:
        """Removes later steps from the tier's list."""
        for later in self._steps():
            if later <= step:
                continue
            try:
                self._tier.set_aside(later)
            except Exception as error:
                reason = f"the abandoned step {later} stays there, delete it by hand ({failure_reason(error)})"
                self._report(CopyFailed(None, self.location, reason))

    def _steps(self) -> list[int]:
        """Lists the tier's steps, ascending; none, with an event, if they cannot be listed."""
        try:
            return self._tier.steps()
        except Exception as error:
            self._report(CopyFailed(None, self.location, f"cannot be listed ({failure_reason(error)})"))
            return []

    def _try_fetch(self, step: int) -> bool:
        begun = time.perf_counter()
        try:
            fetch_step(self._tier, step, self._store)
        except Exception as error:
            self._failed.add(step)
            self._report(SetAside(step, f"in {self.location}: {failure_reason(error)}", None))
            return False
        self.fetched.add(step)
        self._report(Fetched(step, self.location, time.perf_counter() - begun))
        return True
