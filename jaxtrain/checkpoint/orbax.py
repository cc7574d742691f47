"""Reading and writing of arrays with orbax's v1 API. No other module imports orbax."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

NAME = "state"  # folder of the state in a step
_CHUNK = 64 << 20  # bytes of a stored chunk: bounds what a restore onto another mesh reads without need
_READ = 64 << 20  # bytes in flight while restoring
_WRITE = 64 << 20  # bytes in flight while saving, in addition to the arrays


def _context(
    timeout: float, *, read_bytes: int | None = None, write_bytes: int | None = None, partial: bool = False
) -> ocp.Context:
    """Returns the options: OCDBT and zarr3, uncompressed, because weights compress by 7% at half the speed."""
    context = ocp.Context()
    context.array.saving.use_ocdbt = True
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False  # a restore gives its own shardings
    context.array.saving.storage_options.chunk_byte_size = _CHUNK
    context.asynchronous.timeout_secs = ceil(timeout)
    context.memory.read_concurrent_bytes = read_bytes
    context.memory.write_concurrent_bytes = write_bytes
    context.pytree.loading.partial_load = partial
    return context


def write(path: Path, tree: dict[str, Any], timeout: float) -> None:
    """Writes a nested dict of arrays; returns when it is on disk under its final name. One process, any thread."""
    with _context(timeout, write_bytes=_write_limit(tree)):
        ocp.save(str(path), tree, checkpointable_name=NAME)


def start(path: Path, tree: dict[str, Any], timeout: float) -> Any:
    """Copies a nested dict of arrays to the host, then writes it in the background. `path` must not exist.

    All processes call it on their main threads, and each writes the shards it holds.

    Returns: an object whose `result()` waits for the end.
    """
    context = _context(timeout, write_bytes=_write_limit(tree))
    # Orbax would check `path` between two barriers: if that fails on one process, the others wait for the timeout.
    context.file.skip_sync_file_validations = True
    with context:
        return ocp.save_async(str(path), tree, checkpointable_name=NAME)


def _write_limit(tree: dict[str, Any]) -> int:
    """Returns the limit on bytes in flight while saving; more than the largest shard, or orbax refuses to write it.

    Shards above `_CHUNK` are copied into chunks; without a limit the chunks of all shards wait in memory together,
    which is 0.6 to 1.0 of the state.
    """
    arrays = jax.tree.leaves(tree)
    return max([_WRITE, *(shard.data.nbytes + 1 for array in arrays for shard in array.addressable_shards)])


def read(path: Path, abstract: dict[str, Any], partial: bool) -> dict[str, Any]:
    """Reads arrays into the shardings of a nested dict of ShapeDtypeStructs; `partial` ignores other stored arrays."""
    leaves = jax.tree.leaves(abstract)
    # Orbax refuses a single read above its limit instead of waiting.
    largest = max((prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves), default=0)
    with _context(300, read_bytes=max(_READ, 2 * largest + 1), partial=partial):
        return ocp.load(str(path), abstract, checkpointable_name=NAME)
