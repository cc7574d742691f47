"""The only module that talks to orbax: its v1 API, every format choice explicit."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

NAME = "state"  # folder of the state inside a step
_CHUNK = 64 << 20  # bytes of a stored chunk: bounds what a restore onto another mesh reads in vain
_READ = 64 << 20  # bytes in flight while restoring
_WRITE = 64 << 20  # and while saving, beside the arrays themselves


def _context(
    timeout: float, *, read_bytes: int | None = None, write_bytes: int | None = None, partial: bool = False
) -> ocp.Context:
    """OCDBT + zarr3, uncompressed: weights hardly compress (7%), and compression costs a copy and half the speed."""
    context = ocp.Context()
    context.array.saving.use_ocdbt = True
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False  # a restore always says its own shardings
    context.array.saving.storage_options.chunk_byte_size = _CHUNK
    context.asynchronous.timeout_secs = ceil(timeout)
    context.memory.read_concurrent_bytes = read_bytes
    context.memory.write_concurrent_bytes = write_bytes
    context.pytree.loading.partial_load = partial
    return context


def write(path: Path, tree: dict[str, Any], timeout: float) -> None:
    """Writes a nested dict of arrays and returns when it is on disk under its final name. Any thread, one process."""
    with _context(timeout, write_bytes=_in_flight(tree)):
        ocp.save(str(path), tree, checkpointable_name=NAME)


def start(path: Path, tree: dict[str, Any], timeout: float) -> Any:
    """Copies to the host, then writes in the background; `.result()` of what it returns waits. Every process calls it
    from its main thread, and writes the shards it holds. Nothing may be at `path`.

    Orbax would look whether there is, between two barriers on the main thread: where one process's look fails, the
    others would wait there until they time out."""
    context = _context(timeout, write_bytes=_in_flight(tree))
    context.file.skip_sync_file_validations = True
    with context:
        return ocp.save_async(str(path), tree, checkpointable_name=NAME)


def _in_flight(tree: dict[str, Any]) -> int:
    """Bytes that may be on their way to the disk at a time. Shards above `_CHUNK` are copied into chunks, and without
    a limit those of all shards wait together: 0.6 of the state, or all of it.

    More than the largest shard, because orbax refuses any single write from its limit on.
    """
    arrays = jax.tree.leaves(tree)
    return max([_WRITE, *(shard.data.nbytes + 1 for array in arrays for shard in array.addressable_shards)])


def read(path: Path, abstract: dict[str, Any], sizes: dict[str, Any], partial: bool) -> dict[str, Any]:
    """Reads a nested dict of ShapeDtypeStructs with shardings, straight into those shardings.

    Args:
      sizes: {name: ShapeDtypeStruct}: the largest of them bounds the bytes in flight from below, because orbax
        refuses any single read above its limit instead of waiting.
    """
    largest = max((prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in sizes.values()), default=0)
    with _context(300, read_bytes=max(_READ, 2 * largest + 1), partial=partial):
        return ocp.load(str(path), abstract, checkpointable_name=NAME)
