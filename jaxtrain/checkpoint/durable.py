"""The durable tier: whole steps, as they lie in the run's folder, in another folder or an object store.

A step is listed there by its marker alone. In a folder it is written under a temporary name, read back and renamed; in
an object store, which renames nothing, its marker is written last, after every other file was read back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from jaxtrain.checkpoint.events import CopyFailed, Event, Fetched, SetAside
from jaxtrain.checkpoint.files import (
    MARKER,
    difference,
    digest,
    digest_stream,
    fsync_folders,
    parse_marker,
    problem_of,
    reason_of,
)
from jaxtrain.checkpoint.store import TEMPORARY, CheckpointStore
from jaxtrain.errors import CheckpointError
from jaxtrain.io.atomic import fsync
from jaxtrain.io.packages import import_optional


class Tier(Protocol):
    """A place for copies of the steps of one run. Every method may raise what its storage raises."""

    place: str

    def steps(self) -> list[int]:
        """Steps that have a marker, ascending."""
        ...

    def marker(self, step: int) -> bytes:
        """The marker's bytes."""
        ...

    def open(self, step: int, name: str) -> BinaryIO:
        """A file of a step, to read."""
        ...

    def put(self, step: int, source: Path) -> int:
        """Copies a whole step from a folder, reads the copy back, lists it. Returns its bytes."""
        ...

    def delete(self, *steps: int) -> None:
        """Deletes steps; what is half deleted is not listed."""
        ...

    def set_aside(self, step: int) -> None:
        """A step is not listed any more."""
        ...

    def clean(self) -> None:
        """Deletes what killed or failed copies left. Not while one is under way."""
        ...


def open_tier(where: str) -> Tier:
    """The tier at a folder or at a URL of fsspec. Nothing is read or made yet.

    Raises DataError when the URL's package is missing.
    """
    if where.startswith("file://"):
        where = where.removeprefix("file://")
    return Bucket(where) if "://" in where else Folder(Path(os.path.expanduser(where)))


def place_of(durable: str | None, run_dir: Path) -> str | None:
    """Returns the folder in which the tier `checkpoint.durable` keeps the steps of a run: below it, by the name of the
    run's folder.
    """
    return None if durable is None else f"{durable.rstrip('/')}/{Path(os.path.abspath(run_dir)).name}"


def content_at(tier: Tier, step: int) -> dict[str, Any]:
    """Content of a step's marker in a tier. Raises CheckpointError when it is damaged."""
    content = parse_marker(tier.marker(step))
    if content["step"] != step:
        raise CheckpointError(f"{MARKER} is of step {content['step']}")
    return content


def problem_at(tier: Tier, step: int, name: str, expected: list[Any]) -> str | None:
    """Returns the problem of one file of a tier, every byte of which is read, or None."""
    try:
        with tier.open(step, name) as source:
            return difference(name, digest_stream(source), expected)
    except FileNotFoundError:
        return f"{name} is missing"


def fetch(tier: Tier, step: int, store: CheckpointStore) -> None:
    """Copies a step of a tier into the run's folder, checks every byte, and lists it there at once or not at all.

    Raises CheckpointError when it is damaged, and what the storage raises.
    """
    content, raw = content_at(tier, step), tier.marker(step)
    temporary = store.directory / f"{step}{TEMPORARY}"
    _remove(temporary)
    try:
        for name, expected in content["files"].items():
            with tier.open(step, name) as source, _durable(temporary / name) as target:
                found = digest_stream(source, target)
            if problem := difference(name, found, expected):
                raise CheckpointError(problem)
        with _durable(temporary / MARKER) as target:
            target.write(raw)
        _publish(temporary, store.path(step))
    finally:
        _remove(temporary)


class Folder:
    """A tier on a disk that is mounted."""

    def __init__(self, path: Path) -> None:
        self._store = CheckpointStore(path)
        self.place = str(self._store.directory)

    def steps(self) -> list[int]:
        return self._store.marked()

    def marker(self, step: int) -> bytes:
        return (self._store.path(step) / MARKER).read_bytes()

    def open(self, step: int, name: str) -> BinaryIO:
        return open(self._store.path(step) / name, "rb")

    def put(self, step: int, source: Path) -> int:
        raw = (source / MARKER).read_bytes()
        content = parse_marker(raw)
        if is_there(self, step, raw):
            return content["bytes"]
        temporary = self._store.directory / f"{step}{TEMPORARY}"
        self._store.directory.mkdir(parents=True, exist_ok=True)
        self._store.clean(step)
        try:
            for name, expected in content["files"].items():
                with _durable(temporary / name) as target:
                    _checked(name, digest(source / name, target), expected, source)
            with _durable(temporary / MARKER) as target:
                target.write(raw)
            for name, expected in content["files"].items():
                if problem := problem_of(temporary, name, expected):
                    raise CheckpointError(f"the copy is damaged: {problem}")
            if self._store.path(step).exists():  # another of the same number, or a damaged one
                self._store.delete(str(step))
            _publish(temporary, self._store.path(step))
        finally:
            _remove(temporary)
        return content["bytes"]

    def delete(self, *steps: int) -> None:
        self._store.delete(*map(str, steps))

    def set_aside(self, step: int) -> None:
        self._store.set_aside(step, "old")

    def clean(self) -> None:
        self._store.clean()


class Bucket:
    """A tier in an object store, by fsspec."""

    def __init__(self, url: str) -> None:
        self.place = re.sub(r"//[^/@]*@", "//", url.rstrip("/"))  # without name and password
        fsspec = import_optional("fsspec", f"checkpoint.durable {self.place}", "remote")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except ImportError as error:  # s3fs, gcsfs: fsspec's own words name the package
            message = f"checkpoint.durable {self.place}: {error}; install it beside 'jaxtrain[remote]'"
            raise CheckpointError(" ".join(message.split())) from error
        except ValueError as error:
            raise CheckpointError(f"checkpoint.durable {self.place}: {' '.join(str(error).split())}") from error
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

    def put(self, step: int, source: Path) -> int:
        raw = (source / MARKER).read_bytes()
        content = parse_marker(raw)
        if is_there(self, step, raw):
            return content["bytes"]
        self.delete(step)
        for name, expected in content["files"].items():
            with self._fs.open(self._path(step, name), "wb") as target:
                _checked(name, digest(source / name, target), expected, source)
        for name, expected in content["files"].items():
            if problem := problem_at(self, step, name, expected):
                raise CheckpointError(f"the copy is damaged: {problem}")
        self._fs.pipe_file(self._path(step, MARKER), raw)
        return content["bytes"]

    def delete(self, *steps: int) -> None:
        for step in steps:
            if self._fs.exists(self._path(step, MARKER)):
                self._fs.rm_file(self._path(step, MARKER))
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._root}/{step}", recursive=True)

    def set_aside(self, step: int) -> None:
        self.delete(step)

    def clean(self) -> None:
        whole = self.steps()
        self.delete(*(step for step in self._folders() if step not in whole))

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{step}/{name}"


def is_there(tier: Tier, step: int, raw: bytes) -> bool:
    """Returns whether a tier holds a step with this very marker, every byte of it good."""
    if step not in tier.steps() or tier.marker(step) != raw:
        return False
    files = json.loads(raw)["content"]["files"].items()
    return not any(problem_at(tier, step, name, expected) for name, expected in files)


def _checked(name: str, found: tuple[int, str], expected: list[Any], source: Path) -> None:
    if problem := difference(name, found, expected):
        raise CheckpointError(f"{source} is damaged: {problem}")


@contextlib.contextmanager
def _durable(path: Path):
    """A new file, fsynced when it is closed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: Path, path: Path) -> None:
    fsync_folders(temporary)
    os.rename(temporary, path)
    fsync(path.parent)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


class Comeback:
    """Steps of a tier, as a run that restores wants them. A tier that is away is an event.

    Attributes:
      fetched: steps that came from the tier.
    """

    def __init__(self, store: CheckpointStore, tier: Tier, report: Callable[[Event], None]) -> None:
        self._store, self._tier, self._report = store, tier, report
        self._lost: set[int] = set()  # steps that could not be fetched
        self.fetched: set[int] = set()

    @property
    def place(self) -> str:
        """Location of the tier."""
        return self._tier.place

    def is_empty(self) -> bool:
        """Returns whether the tier holds no step. Raises CheckpointError when nobody can tell."""
        try:
            return not self._tier.steps()
        except Exception as error:  # each store has its own classes of them
            raise CheckpointError(f"{self.place} cannot be listed: {reason_of(error)}") from error

    def supply(self, step: int | None) -> int | None:
        """Fetches `step`, or the newest one that is good and newer than those in the folder. Returns it, or None."""
        here = self._store.marked()
        newest = here[-1] if here else -1
        for known in reversed(self._steps()):
            is_wanted = known > newest if step is None else known == step and step not in here
            if is_wanted and known not in self._lost and self._fetch(known):
                return known
        return None

    def forget(self, after: int) -> None:
        """Later steps are not listed any more."""
        for step in self._steps():
            if step <= after:
                continue
            try:
                self._tier.set_aside(step)
            except Exception as error:
                reason = f"the abandoned step {step} stays there, delete it by hand ({reason_of(error)})"
                self._report(CopyFailed(None, self.place, reason))

    def _steps(self) -> list[int]:
        """Ascending; none, with an event, where they cannot be read."""
        try:
            return self._tier.steps()
        except Exception as error:
            self._report(CopyFailed(None, self.place, f"cannot be listed ({reason_of(error)})"))
            return []

    def _fetch(self, step: int) -> bool:
        begun = time.perf_counter()
        try:
            fetch(self._tier, step, self._store)
        except Exception as error:
            self._lost.add(step)
            self._report(SetAside(step, f"in {self.place}: {reason_of(error)}", None))
            return False
        self.fetched.add(step)
        self._report(Fetched(step, self.place, time.perf_counter() - begun))
        return True
