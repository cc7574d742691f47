"""Reading and writing of arrays with orbax's v1 API. No other module imports orbax."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxtrain.checkpoint.files import failure_reason
from jaxtrain.errors import CheckpointError

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
    with _context(300, read_bytes=_read_limit(jax.tree.leaves(abstract)), partial=partial):
        return ocp.load(str(path), abstract, checkpointable_name=NAME)


def stored_arrays(path: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `a/b/c` -> shape and dtype of the arrays in any folder that orbax wrote.

    Raises:
        CheckpointError: not such a folder.
    """
    try:
        leaves = _leaves(ocp.metadata(path).metadata)
    except Exception as error:
        raise CheckpointError(f"{path} is no checkpoint of orbax: {failure_reason(error)}") from error
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items() if _is_array(leaf)}


def read_arrays(path: str, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads some arrays of such a folder, each in its dtype and sharding; the others are not read."""
    stored = ocp.metadata(path).metadata
    leaves = [wanted.get(name, ocp.PLACEHOLDER) for name in _leaves(stored)]
    abstract = jax.tree.unflatten(jax.tree.structure(stored, is_leaf=_is_array), leaves)
    with _context(300, read_bytes=_read_limit(list(wanted.values()))):
        found = _leaves(ocp.load(path, abstract))
    return {name: found[name] for name in wanted}


def _leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_array)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _read_limit(leaves: list[Any]) -> int:
    """Returns the limit on bytes in flight while reading. Orbax refuses a single read above it instead of waiting."""
    return max(_READ, *(2 * prod(leaf.shape) * np.dtype(leaf.dtype).itemsize + 1 for leaf in leaves), 0)
