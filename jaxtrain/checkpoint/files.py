"""Files of checkpoints: markers, checksums, locks, and storage errors in one line."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import xxhash

from jaxtrain.errors import CheckpointError, format_name, format_value
from jaxtrain.io.atomic import fsync, write_atomic

MARKER = "jaxtrain.json"  # written last: a step without it is not committed
FORMAT = 1
DATA_FILE = "data/process_{}.json"  # place of a process in its data
PART = "jaxtrain.files-{}.json"  # checksums of one process, merged into the marker
_CHUNK = 4 << 20
_DISK_FULL = ("RESOURCE_EXHAUSTED", "No space left", "OUT_OF_RANGE", "File too large", "Disk quota")

TensorSpecs = dict[str, list[Any]]  # name -> [shape, dtype], as in JSON
FileDigest = Sequence[Any]  # (size in bytes, xxh3-64 as hex)


def failure_reason(error: BaseException) -> str:
    """Describes in one line why orbax, an object store or the file system failed."""
    if isinstance(error, CheckpointError):
        return str(error)
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    text, root = " ".join(map(str, chain)), " ".join(str(chain[-1]).split())
    root = root if len(root) <= 200 else root[:197] + "..."
    if any(sign in text for sign in _DISK_FULL):
        return f"the disk is full or a size limit is reached ({root})"
    return f"{type(chain[-1]).__name__}: {root}"


def digest(source: BinaryIO, target: BinaryIO | None = None) -> tuple[int, str]:
    """Returns (size in bytes, xxh3-64 as hex) of a stream, read in 4 MiB chunks that are also written to `target`."""
    state, size = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(_CHUNK))
    while count := source.readinto(buffer):  # pyright: ignore[reportAttributeAccessIssue]
        state.update(buffer[:count])
        size += count
        if target is not None:
            target.write(buffer[:count])
    return size, state.hexdigest()


def digest_file(path: Path) -> tuple[int, str]:
    """Returns the `digest` of a file."""
    with open(path, "rb", buffering=0) as file:
        return digest(file)  # pyright: ignore[reportArgumentType]


def step_files(folder: Path) -> list[str]:
    """Returns the relative names of a step's files, of all processes, sorted, without our own marker and parts."""
    paths = (os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)
    names = (os.path.relpath(path, folder) for path in paths)
    return sorted(name for name in names if not name.startswith("jaxtrain."))


def flush_and_digest(folder: Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """Flushes files of a step to the disk and returns {name: (size, digest)}."""
    sealed = {}
    for name in names:
        fsync(folder / name)
        sealed[name] = digest_file(folder / name)
    return sealed


def fsync_folders(folder: Path) -> None:
    """Flushes every folder of a step and its parent to the disk, so that the names survive a power loss."""
    for root, _, _ in os.walk(folder, topdown=False):
        fsync(Path(root))
    fsync(folder.parent)


def file_problem(folder: Path, name: str, expected: FileDigest) -> str | None:
    """Describes what is wrong with a file of a step, or returns None. Reads every byte."""
    if (problem := size_problem(folder, name, expected)) is not None:
        return problem
    try:
        return digest_problem(name, digest_file(folder / name), expected)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"


def size_problem(folder: Path, name: str, expected: FileDigest) -> str | None:
    """Describes what is wrong with a file's kind or size, or returns None. Reads no byte."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{name} is a link that leaves the checkpoint"
        status = path.stat()
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        return f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is not a file"
    return None if status.st_size == expected[0] else f"{name} has {status.st_size} bytes instead of {expected[0]}"


def digest_problem(name: str, actual: FileDigest, expected: FileDigest) -> str | None:
    """Describes how a file's size and digest differ from those in the marker, or returns None."""
    if actual[0] != expected[0]:
        return f"{name} has {actual[0]} bytes instead of {expected[0]}"
    return None if actual[1] == expected[1] else f"{name} has another checksum than when it was written"


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def write_marker(folder: Path, content: dict[str, Any]) -> None:
    """Writes the marker of a step with its own digest. `content` must be JSON-able, its file names relative."""
    text = _canonical(content)
    checksum = xxhash.xxh3_64_hexdigest(text.encode())
    write_atomic(folder / MARKER, json.dumps({"digest": checksum, "content": json.loads(text)}))


def read_marker(folder: Path) -> dict[str, Any]:
    """Returns the content of a step's marker.

    Raises:
      FileNotFoundError: there is none; the step was never committed.
      CheckpointError: it is damaged, of an unknown format, or names a file outside of its step.
    """
    return parse_marker((folder / MARKER).read_bytes())


def parse_marker(text: bytes) -> dict[str, Any]:
    """Returns the content of a marker from its bytes. Raises CheckpointError as `read_marker` does."""
    try:
        marker = json.loads(text)
        content, checksum = marker["content"], marker["digest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{MARKER} is not readable") from None
    if xxhash.xxh3_64_hexdigest(_canonical(content).encode()) != checksum:
        raise CheckpointError(f"{MARKER} has another checksum than when it was written")
    if not isinstance(content, dict):
        raise CheckpointError(f"{MARKER} is not readable")
    version = content.get("format")
    if type(version) is not int or version != FORMAT:  # True equals 1
        raise CheckpointError(f"{MARKER} has format {format_value(version)}; this version reads format {FORMAT}")
    if not _is_well_formed(content):
        raise CheckpointError(f"{MARKER} is not readable")
    for name in content["files"]:
        if not is_inside(name):
            raise CheckpointError(f"{MARKER} names {format_name(name)}, which is outside of the checkpoint")
    return content


def _is_well_formed(content: dict[str, Any]) -> bool:
    """Returns whether a marker's fields have the types that the program relies on; anyone can write a marker."""
    types = {"step": int, "time": int | float, "bytes": int, "files": dict, "tensors": dict, "manifest": dict}
    if not all(isinstance(content.get(name), kind) for name, kind in types.items()):
        return False
    metrics, pairs = content.get("metrics") or {}, [*content["files"].values(), *content["tensors"].values()]
    return (
        isinstance(metrics, dict)
        and all(isinstance(value, int | float) for value in metrics.values())
        and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        and all(isinstance(size, int) for size, _ in content["files"].values())
        and all(isinstance(shape, list) and isinstance(kind, str) for shape, kind in content["tensors"].values())
    )


def is_inside(name: str) -> bool:
    """Returns whether a relative name with `/` stays below its folder: no `..`, not absolute, not empty, encodable."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    parts = name.split("/")
    return bool(name) and "\0" not in name and not PurePosixPath(name).is_absolute() and not {"", ".", ".."} & {*parts}


class Lock:
    """Exclusive `flock` on a file, so that two runs never write to one folder. The kernel frees it on any death.

    Raises CheckpointError, which names the holder and gives the `advice`, if another process has it. `holder` follows
    the name of this process.
    """

    def __init__(
        self, path: Path, holder: str = "", advice: str = "stop it, or give this run another name or dir"
    ) -> None:
        try:
            self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held until release()
        except OSError as error:
            reason = f"{error.strerror}: {path}"
            raise CheckpointError(f"{reason}; expected a folder that this process may write") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            other = self._file.read().strip() or "another process"
            self._file.close()
            if isinstance(error, BlockingIOError):
                message = f"{path.parent} is being written by {other}: {advice}"
            else:
                message = f"{path} cannot be locked ({error.strerror}): use a file system with flock"
            raise CheckpointError(message) from None
        self._path, self._text = path.absolute(), f"process {os.getpid()} on {socket.gethostname()}{holder}"
        self._folder = os.open(path.parent, os.O_RDONLY)  # open, so that no other folder gets its number
        self._file.truncate(0)
        self._file.write(self._text)
        self._file.flush()

    def problem(self) -> str | None:
        """Describes why the folder is no longer this process's to write, or returns None.

        It was moved, deleted, or taken by another process, such as one on a machine that the file system does not tell
        of locks. Nothing is known while the file system does not answer.
        """
        folder = self._path.parent
        try:
            found = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None if self._is_in_place() else f"{folder} is gone: {self._whereabouts()}"
        except OSError:
            return None
        return None if found in ("", self._text) else f"{folder} is now written by {found}"

    def _is_in_place(self) -> bool:
        """Returns whether the folder is still there, although somebody has deleted the lock in it."""
        try:
            return os.path.samestat(os.fstat(self._folder), os.stat(self._path.parent))
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _whereabouts(self) -> str:
        """Describes where a folder is that has left its place; Linux knows by the open file."""
        try:
            now = os.readlink(f"/proc/self/fd/{self._folder}")
        except OSError:
            now = ""
        return f"it was moved to {now}" if os.path.isdir(now) else "it was moved or deleted"

    def release(self) -> None:
        """Frees the lock."""
        self._file.close()
        os.close(self._folder)
