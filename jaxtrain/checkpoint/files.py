"""Files of a checkpoint: checksums, durable writes, the marker, the lock. No JAX.

The marker `jaxtrain.json` is written last into a step's folder, after every other file and folder of the step is
fsynced. It lists size and xxh3-64 digest of every file and carries a digest of itself, so that a step is either
provably whole or not listed at all. xxh3 runs at memory speed (about 17 GiB/s a core), so that reading decides.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

import xxhash

from jaxtrain.config.errors import UserError

MARKER = "jaxtrain.json"
FORMAT = 1
PART = "jaxtrain.files-{}.json"  # checksums of one process, merged into the marker
_CHUNK = 4 << 20


class CheckpointError(UserError):
    """A checkpoint cannot be written, found, read or used; the message is one line."""


def digest(path: Path) -> tuple[int, str]:
    """(size in bytes, xxh3-64 hex digest) of a file, read in 4 MiB pieces."""
    state, size = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            size += count
    return size, state.hexdigest()


def fsync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, text: str) -> None:
    """Writes a small file that is whole or absent after a crash: temporary, fsync, rename, fsync of the folder."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync(path.parent)


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
    """What is wrong with one file of a step, in words, or None."""
    size, expected_digest = expected
    try:
        found, found_digest = digest(folder / name)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    if found != size:
        return f"{name} has {found} bytes instead of {size}"
    if found_digest != expected_digest:
        return f"{name} has another checksum than when it was written"
    return None


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def write_marker(folder: Path, content: dict[str, Any]) -> None:
    """Writes the marker of a step, with its own digest. `content` must be JSON-able."""
    text = _canonical(content)
    checksum = xxhash.xxh3_64_hexdigest(text.encode())
    write_durably(folder / MARKER, json.dumps({"digest": checksum, "content": json.loads(text)}))


def read_marker(folder: Path) -> dict[str, Any]:
    """Content of the marker of a step.

    Raises:
      FileNotFoundError: there is none; the step was never committed.
      CheckpointError: it is damaged, or of a format this version does not read.
    """
    text = (folder / MARKER).read_bytes()
    try:
        marker = json.loads(text)
        content, checksum = marker["content"], marker["digest"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{MARKER} is not readable") from None
    if xxhash.xxh3_64_hexdigest(_canonical(content).encode()) != checksum:
        raise CheckpointError(f"{MARKER} has another checksum than when it was written")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{MARKER} has format {content['format']}; this version reads format {FORMAT}")
    return content


class Lock:
    """An exclusive `flock` on a file, so that two runs never write to one folder. The kernel frees it on any death.

    Raises CheckpointError, naming the holder, when another process has it.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held until release()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            if isinstance(error, BlockingIOError):
                message = f"{path.parent} is being written by {holder}: stop it, or give this run another name or dir"
            else:
                message = f"{path} cannot be locked ({error.strerror}): use a file system with flock"
            raise CheckpointError(message) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        """Frees the lock."""
        self._file.close()
