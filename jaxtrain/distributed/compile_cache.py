"""JAX's folder of compiled programs, made safe for several processes that write it and are killed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from jaxtrain.io.atomic import write_atomic


def write_entries_atomically() -> None:
    """Makes JAX replace an entry of a local folder as a whole.

    JAX writes it in place and never replaces it. After a kill, or on a full disk, a part of an entry stays: every later
    process warns that it cannot be read, and compiles again.
    """
    module: Any = importlib.import_module("jax._src.lru_cache")
    cache: Any = getattr(module, "LRUCache", None)
    suffix = getattr(module, "_CACHE_SUFFIX", None)
    write: Any = getattr(cache, "put", None)
    if write is None or suffix is None or getattr(write, "is_atomic", False):
        return  # another version of JAX

    def put(self: Any, key: str, value: bytes) -> None:
        folder = str(getattr(self, "path", ""))
        if "://" in folder or not os.path.isdir(folder) or getattr(self, "eviction_enabled", True):
            write(self, key, value)
        else:
            write_atomic(Path(folder) / f"{key}{suffix}", value)

    put.is_atomic = True  # pyright: ignore[reportFunctionMemberAccess]
    cache.put = put
