"""Appending to, reading and truncating JSON-lines files."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxtrain.io.atomic import open_atomic

ENCODER = json.JSONEncoder(allow_nan=False, default=str)
APPEND_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # for os.open


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Returns a record as one line of JSON."""
    return (ENCODER.encode(to_json(record)) + "\n").encode()


def append_bytes(file: int, data: bytes) -> None:
    """Appends data to a file descriptor in a single write, so that a killed process leaves no partial line.

    Raises:
      OSError: the disk is full.
    """
    written = os.write(file, data)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes written, is the disk full?")


class PostponedError(OSError):
    """Data could not be written, is kept in memory, and will be tried again. One line."""


class AppendedFile:
    """File to which records are appended; what a full or failing disk refuses is kept and written later, in order.

    Each record is a single write, so that a killed process leaves no partial one. Thread-safe.
    """

    LIMIT = 16 << 20  # bytes kept in memory
    QUIET = 60.0  # seconds after a `PostponedError` without another one

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self._lock = os.open(path, APPEND_FLAGS, 0o644), threading.Lock()
        self._kept, self._records, self._reported = b"", 0, -math.inf

    def append(self, record: bytes) -> None:
        """Appends a record.

        Raises:
          PostponedError: it is kept in memory; at most once in `QUIET` seconds.
          OSError: more than `LIMIT` bytes would be kept. The record is lost.
        """
        with self._lock:
            if len(self._kept) + len(record) > self.LIMIT:
                raise OSError(
                    f"{self.path.name} cannot be written, and {self._records:,} records of it are kept already"
                )
            self._kept += record
            self._records += 1
            reason, now = self._write(), time.monotonic()
            if reason and now - self._reported > self.QUIET:
                self._reported = now
                raise PostponedError(f"{self.path.name} cannot be written ({reason}): kept in memory until it can")

    def close(self) -> None:
        """Writes what is kept, and closes the file. Raises OSError if that cannot be written."""
        with self._lock:
            reason = self._write()
            os.close(self._file)
            if reason:
                raise OSError(f"the last {self._records:,} records of {self.path.name} are lost ({reason})")

    def _write(self) -> str | None:
        """Writes what is kept. Returns why that failed, or None."""
        try:
            while self._kept:
                self._kept = self._kept[os.write(self._file, self._kept) :]
        except OSError as error:
            return error.strerror or str(error)
        self._records = 0
        return None


def timestamped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with its UTC time in front."""
    return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}


def append_record(path: Path, fields: Mapping[str, Any], sync: bool = False) -> None:
    """Appends a record with its time to a file; `sync` flushes it to the disk. Raises OSError if the disk is full."""
    file = os.open(path, APPEND_FLAGS, 0o644)
    try:
        append_bytes(file, encode_record(timestamped(fields)))
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def to_json(value: Any) -> Any:
    """Converts a value for JSON: non-finite floats become strings, NumPy and JAX scalars become Python numbers."""
    if isinstance(value, float):  # most values: a check for a mapping takes longer
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return to_json(value.item())
    return value


def read_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields (line, parsed object) of a JSON-lines file; the object is None if the line is broken.

    A file that does not exist has no lines.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            yield line, parse_record(line)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line; None if the line is broken or has no end."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def truncate_after(path: Path, step: int | None) -> int:
    """Removes broken lines and, if `step` is given, records of later steps. Replaces the file atomically.

    A record whose step is no number is kept.

    Returns:
      The number of records of later steps that were removed.
    """

    def is_later(record: dict[str, Any]) -> bool:
        found = record.get("step")
        return step is not None and isinstance(found, int | float) and found > step

    broken = later = 0
    for _, record in read_records(path):
        broken, later = broken + (record is None), later + (record is not None and is_later(record))
    if broken or later:
        with open_atomic(path) as file:
            file.writelines(line for line, record in read_records(path) if record is not None and not is_later(record))
    return later
