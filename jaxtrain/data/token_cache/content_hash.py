"""Hashes of source files, remembered between builds.

A token cache is keyed by the bytes of its source files. Times and sizes would miss an edit that preserves them
(`cp -p`, `rsync -t`, two writes within a clock tick), and would not match copies of one corpus on two machines. Hashing
is cheap: xxh3 reads 17 GB/s, and each hash is stored beside the caches under (size, mtime, ctime, inode). The kernel
sets ctime at every change, so it cannot be preserved or faked. Files changed in the last seconds are not remembered,
because another write could have the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from jaxtrain.data.sources import File
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import write_atomic

MIN_AGE = 3.0  # seconds since the last change of a file whose hash is remembered


def file_state(path: str) -> list[int]:
    """Returns [size, mtime_ns, ctime_ns, inode], which changes with the file. Raises DataError if it is gone."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def hash_content(path: str) -> str:
    """Returns the xxh3-128 of a file, hex. Raises DataError if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def hash_files(files: list[File], store: Path) -> list[tuple[str, list[int]]]:
    """Returns (hash, `file_state` before hashing) of each file.

    Args:
      files: files of a source.
      store: JSON file with the hashes of earlier calls; updated. Losing it only costs time.
    """
    try:
        stored: dict[str, list] = dict(json.loads(store.read_text()))
    except (OSError, ValueError, TypeError):
        stored = {}
    states = {f.path: file_state(f.path) for f in files}
    changed = [path for path, state in states.items() if stored.get(path, [None])[0] != state]
    hashes = {path: entry[1] for path, entry in stored.items() if path in states}
    with ThreadPoolExecutor(4) as pool:
        hashes |= zip(changed, pool.map(hash_content, changed))
    if changed:
        newest = time.time_ns() - int(MIN_AGE * 1e9)
        entries = {p: [s, hashes[p]] for p, s in states.items() if s[2] < newest and file_state(p) == s}
        with suppress(OSError):  # a complete cache may be on a disk that is full or read-only
            store.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(store, json.dumps(entries))
    return [(hashes[f.path], states[f.path]) for f in files]
