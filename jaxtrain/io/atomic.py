"""Atomic file writes: after a kill or a power loss a file has its old content or its new one, never a part."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO


def fsync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_atomic(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` when the block ends, and is deleted if the block raises.

    File and folder are flushed to the disk. `mode`: permissions of the file, less those that the umask takes.
    """
    # Random, because processes of several machines or containers that share a folder may have one number.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync(path.parent)


def write_atomic(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Writes a file (text as UTF-8) as `open_atomic` does."""
    with open_atomic(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
