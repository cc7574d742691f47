"""Reading and mapping the files of a token cache, and what is said where that fails."""

from __future__ import annotations

import errno
import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash

from jaxtrain.errors import DataError

OPEN_MAPS = 400  # files mapped at a time by this process, where the limit on open files is generous
Mapped = tuple[mmap.mmap, np.ndarray]


def file_limit() -> int | None:
    """Files this process may have open (soft RLIMIT_NOFILE); None where there is no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def map_limit() -> int:
    """Files mapped at a time: each keeps a descriptor, and three quarters of those are for everything else."""
    limit = file_limit()
    return OPEN_MAPS if limit is None else max(min(OPEN_MAPS, limit // 4), 1)


class Maps:
    """Files mapped as they are asked for. The last used `map_limit()` stay mapped, counted over all objects of this
    class: the limit on open files is one of the process. With the object its maps go. Safe to use from several threads.

    Args:
      paths: of the files, none of them empty.
      dtype: of what they hold.
    """

    _lock: ClassVar = threading.Lock()
    _used: ClassVar[OrderedDict[tuple[weakref.ref[Maps], int], None]] = OrderedDict()  # longest unused first

    def __init__(self, paths: Sequence[Path], dtype: np.dtype) -> None:
        self._paths, self._dtype = paths, dtype
        self._held: dict[int, Mapped] = {}
        self._me: weakref.ref[Maps] = weakref.ref(self)

    def get(self, index: int) -> Mapped:
        """(map, its content [n]) of a file. Raises DataError where it is damaged or cannot be opened."""
        key = (self._me, index)
        with self._lock:
            found = self._held.get(index)
            if found is None:
                self._drop(map_limit() - 1)
                found = self._held[index] = self._map(self._paths[index])
                self._used[key] = None
            else:
                self._used.move_to_end(key)
            return found

    @classmethod
    def _drop(cls, keep: int) -> None:
        """Forget all but `keep` maps; those still in use stay open until they are not."""
        while len(cls._used) > keep:
            (owner, index), _ = cls._used.popitem(last=False)
            maps = owner()
            if maps is not None:
                del maps._held[index]

    def _map(self, path: Path) -> Mapped:
        try:
            mapped = _open_map(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise unreadable(path, error) from error
            self._drop(0)  # others have opened more than their share
            try:
                mapped = _open_map(path)
            except OSError as again:
                raise unreadable(path, again) from again
        except ValueError as error:  # an empty file
            raise damaged(path, f"cannot be mapped ({error})") from error
        return mapped, np.frombuffer(mapped, self._dtype)


def _open_map(path: Path) -> mmap.mmap:
    with open(path, "rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def hash_tokens(path: Path) -> str:
    """xxh3-64 of a file, hex. Raises DataError where it cannot be read."""
    hasher = xxhash.xxh3_64()
    try:
        with open(path, "rb", buffering=0) as f:
            while chunk := f.read(4 << 20):
                hasher.update(chunk)
    except OSError as error:
        raise unreadable(path, error) from error
    return hasher.hexdigest()


def read(path: Path) -> bytes:
    """A whole file. Raises DataError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def size(path: Path) -> int:
    """Bytes of a file. Raises DataError where there is none."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def damaged(path: Path, what: str) -> DataError:
    """The error for a file that is not what was written."""
    return DataError(f"{path}: damaged token cache: {what}; `jaxtrain data build` repairs it")


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not give: damage, unless something else is short."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = file_limit()
        allowed = f" (this process may have {limit})" if error.errno == errno.EMFILE and limit else ""
        return DataError(f"{path}: cannot be opened: too many open files{allowed}; raise the limit with `ulimit -n`")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENOMEM):
        return DataError(f"{path}: cannot be read ({error.strerror})")
    return damaged(path, str(error.strerror))
