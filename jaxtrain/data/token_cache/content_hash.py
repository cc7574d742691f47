"""The content key of a source: a hash of every file's name and bytes.

Hashing bytes is the only key that is right: times and sizes miss an edit that keeps them (`cp -p`, `rsync -t`, two
writes within a clock tick) and miss that two machines hold the same corpus. It is also cheap: xxh3 reads 17 GB/s, and
each file's hash is remembered in one small file beside the caches under (size, mtime, ctime, inode). The kernel
sets ctime itself on any change of content or metadata, so that it cannot be kept or faked; a file changed in the last
seconds is not remembered, since another write could carry the same time.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from jaxtrain.data.sources import File
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import write_atomic

SETTLED = 3.0  # seconds since the last change after which a hash may be remembered
CHUNK = 4 << 20  # bytes read at a time


def state(path: str) -> list[int]:
    """[size, mtime_ns, ctime_ns, inode]: changes whenever the file does.

    Raises:
      DataError: the file is gone.
    """
    try:
        s = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    return [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino]


def hash_file(path: str) -> str:
    """xxh3-128 of a file's bytes, hex. Raises DataError if it cannot be read."""
    hasher = xxhash.xxh3_128()
    try:
        with open(path, "rb", buffering=0) as f:
            while chunk := f.read(CHUNK):
                hasher.update(chunk)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    return hasher.hexdigest()


def hash_files(files: list[File], memory: Path) -> list[tuple[str, list[int]]]:
    """(hash, `state` before hashing) of files, in order.

    Hashes of files unchanged since the last call are taken from the file `memory`, which is updated.
    """
    known: dict[str, list] = {}
    if memory.exists():
        try:
            known = dict(json.loads(memory.read_text()))
        except (OSError, ValueError, TypeError):
            known = {}  # a lost memory only costs time
    states = {f.path: state(f.path) for f in files}
    stale = [p for p, s in states.items() if known.get(p, [None])[0] != s]
    with ThreadPoolExecutor(4) as pool:
        fresh = dict(zip(stale, pool.map(hash_file, stale)))
    hashes = {p: fresh[p] if p in fresh else known[p][1] for p in states}
    if fresh:
        settled = time.time_ns() - int(SETTLED * 1e9)
        keep = {p: [s, hashes[p]] for p, s in states.items() if s[2] < settled and state(p) == s}
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(memory, json.dumps(keep))
    return [(hashes[f.path], states[f.path]) for f in files]
