"""JSON-lines files: appended to, read and cut."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.io.atomic import open_atomic

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # flags of a file that lines are appended to


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON."""
    return (json.dumps(valid(record), allow_nan=False, default=str) + "\n").encode()


def append(file: int, data: bytes) -> None:
    """One write to a descriptor: what a killed process wrote is complete. Raises OSError when the disk is full."""
    written = os.write(file, data)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes written, is the disk full?")


def valid(value: Any) -> Any:
    """`value` with floats that are not finite as strings, and NumPy or JAX scalars as Python numbers."""
    if isinstance(value, Mapping):
        return {str(key): valid(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [valid(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(line, its object) of a JSON-lines file that may end in a broken line, or not exist; None for a broken one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            yield line, record if isinstance(record, dict) else None


def cut_after(path: Path, step: int | None) -> int:
    """Removes broken lines and, unless None, those of steps after `step`; returns how many of the latter.

    The file is replaced at once, so that a kill leaves the old or the new one.
    """

    def later(record: dict[str, Any]) -> bool:
        return step is not None and record.get("step", 0) > step

    bad = cut = 0
    for _, record in read_lines(path):
        bad, cut = bad + (record is None), cut + (record is not None and later(record))
    if bad or cut:
        with open_atomic(path) as file:
            file.writelines(line for line, record in read_lines(path) if record is not None and not later(record))
    return cut
