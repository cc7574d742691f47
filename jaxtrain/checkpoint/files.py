"""Files of checkpoints: atomic writes, locks, markers and checksums, and storage errors in one line."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import xxhash

from jaxtrain.errors import CheckpointError
from jaxtrain.io.atomic import fsync, write_atomic

LATE = "another process did not write its part in time"


def reason_of(error: BaseException) -> str:
    """One line that says why orbax, an object store, or the file system under them failed."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    whole = " ".join(str(link) for link in chain)
    for sign in ("RESOURCE_EXHAUSTED", "No space left", "OUT_OF_RANGE", "File too large", "Disk quota"):
        if sign in whole:
            return f"the disk is full or a size limit is reached ({_line(chain[-1])})"
    if isinstance(error, CheckpointError):
        return str(error)
    if "barrier" in whole and "DEADLINE_EXCEEDED" in whole:
        return LATE
    return f"{type(chain[-1]).__name__}: {_line(chain[-1])}"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."


MARKER = "jaxtrain.json"
FORMAT = 1
PART = "jaxtrain.files-{}.json"  # checksums of one process, merged into the marker
_CHUNK = 4 << 20


def digest(path: Path, target: BinaryIO | None = None) -> tuple[int, str]:
    """(size in bytes, xxh3-64 hex digest) of a file, read in 4 MiB pieces, which are also written to `target`."""
    state, size = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            size += count
            if target is not None:
                target.write(buffer[:count])
    return size, state.hexdigest()


def digest_stream(source: BinaryIO, target: BinaryIO | None = None) -> tuple[int, str]:
    """`digest` of what is not a local file."""
    state, size = xxhash.xxh3_64(), 0
    while piece := source.read(_CHUNK):
        state.update(piece)
        size += len(piece)
        if target is not None:
            target.write(piece)
    return size, state.hexdigest()


def step_files(folder: Path) -> list[str]:
    """Relative names of the files of a step, sorted; our own marker and parts left out."""
    found = []
    for root, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(root, name), folder) for name in names]
    return sorted(name for name in found if not name.startswith("jaxtrain."))


def seal(folder: Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """fsyncs these files of a step and returns {name: (size, digest)}."""
    sealed = {}
    for name in names:
        fsync(folder / name)
        sealed[name] = digest(folder / name)
    return sealed


def fsync_folders(folder: Path) -> None:
    """fsyncs every folder of a step and the one that holds it, so that the names survive a power loss too."""
    for root, _, _ in os.walk(folder, topdown=False):
        fsync(Path(root))
    fsync(folder.parent)


def problem_of(folder: Path, name: str, expected: tuple[int, str] | list[Any]) -> str | None:
    """Returns the problem of one file of a step, in words, or None. Every byte is read."""
    if (problem := size_problem(folder, name, expected)) is not None:
        return problem
    try:
        return difference(name, digest(folder / name), expected)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"


def size_problem(folder: Path, name: str, expected: tuple[int, str] | list[Any]) -> str | None:
    """Returns the problem of a file's size, in words, or None. No byte is read."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{name} is a link that leaves the checkpoint"
        found = path.stat()
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        return f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
    if not stat.S_ISREG(found.st_mode):
        return f"{name} is not a file"
    return None if found.st_size == expected[0] else f"{name} has {found.st_size} bytes instead of {expected[0]}"


def difference(name: str, found: tuple[int, str], expected: tuple[int, str] | list[Any]) -> str | None:
    """Describes how (size, digest) of a file differ from what the marker says, in words, or None."""
    if found[0] != expected[0]:
        return f"{name} has {found[0]} bytes instead of {expected[0]}"
    return None if found[1] == expected[1] else f"{name} has another checksum than when it was written"


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def write_marker(folder: Path, content: dict[str, Any]) -> None:
    """Writes the marker of a step, with its own digest. `content` must be JSON-able, its files' names relative."""
    text = _canonical(content)
    checksum = xxhash.xxh3_64_hexdigest(text.encode())
    write_atomic(folder / MARKER, json.dumps({"digest": checksum, "content": json.loads(text)}))


def read_marker(folder: Path) -> dict[str, Any]:
    """Content of the marker of a step.

    Raises:
      FileNotFoundError: there is none; the step was never committed.
      CheckpointError: it is damaged, of a format this version does not read, or names a file outside of its step.
    """
    return parse_marker((folder / MARKER).read_bytes())


def parse_marker(text: bytes) -> dict[str, Any]:
    """`read_marker` of its bytes."""
    try:
        marker = json.loads(text)
        content, checksum = marker["content"], marker["digest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{MARKER} is not readable") from None
    if xxhash.xxh3_64_hexdigest(_canonical(content).encode()) != checksum:
        raise CheckpointError(f"{MARKER} has another checksum than when it was written")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise CheckpointError(f"{MARKER} has format {found!r}; this version reads format {FORMAT}")
    if not _is_well_formed(content):
        raise CheckpointError(f"{MARKER} is not readable")
    for name in content["files"]:
        if not is_inside(name):
            raise CheckpointError(f"{MARKER} names {name!r}, which lies outside of the checkpoint")
    return content


def _is_well_formed(content: dict[str, Any]) -> bool:
    """Returns whether the parts of a marker are of the kinds that the program relies on: anyone can write one."""
    kinds = {"step": int, "time": int | float, "bytes": int, "files": dict, "tensors": dict, "manifest": dict}
    if not all(isinstance(content.get(name), kind) for name, kind in kinds.items()):
        return False
    metrics, lists = content.get("metrics") or {}, [*content["files"].values(), *content["tensors"].values()]
    return (
        isinstance(metrics, dict)
        and all(isinstance(value, int | float) for value in metrics.values())
        and all(isinstance(pair, list) and len(pair) == 2 for pair in lists)
        and all(isinstance(size, int) for size, _ in content["files"].values())
        and all(isinstance(shape, list) and isinstance(kind, str) for shape, kind in content["tensors"].values())
    )


def is_inside(name: str) -> bool:
    """Returns whether a relative name, with `/`, stays below the folder it is joined to: no `..`, not absolute, not
    empty.
    """
    parts = name.split("/")
    return bool(name) and "\0" not in name and not PurePosixPath(name).is_absolute() and not {"", ".", ".."} & {*parts}


class Lock:
    """An exclusive `flock` on a file, so that two runs never write to one folder. The kernel frees it on any death.

    Raises CheckpointError, naming the holder and giving the `advice`, when another process has it.
    """

    def __init__(self, path: Path, advice: str = "stop it, or give this run another name or dir") -> None:
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held until release()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            if isinstance(error, BlockingIOError):
                message = f"{path.parent} is being written by {holder}: {advice}"
            else:
                message = f"{path} cannot be locked ({error.strerror}): use a file system with flock"
            raise CheckpointError(message) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        """Frees the lock."""
        self._file.close()
