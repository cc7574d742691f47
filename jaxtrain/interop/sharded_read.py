"""Creation of sharded arrays from values on the host, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.interop.tensor_slices import Index

BLOCK_BYTES = 8 << 20  # bytes of an array on the host at a time


def read_sharded(leaf: jax.ShapeDtypeStruct, read: Callable[[Index], np.ndarray], dims: Sequence[int]) -> jax.Array:
    """Creates an array in its sharding, in blocks of at most `BLOCK_BYTES`.

    Each process reads its shards; one that several devices hold is read once.

    Args:
        leaf: shape, dtype and sharding of the array.
        read: returns a block of it in its dtype.
        dims: dims in the order in which they are split into blocks, first those that are slowest in the file.
    """
    assert leaf.sharding is not None
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index or (), leaf.shape))
        devices.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, holders in devices.items():
        arrays += _read_shard(tuple(slice(*dim) for dim in bounds), leaf.dtype, read, dims, holders)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def _read_shard(
    index: Index, dtype: Any, read: Callable[[Index], np.ndarray], dims: Sequence[int], devices: list[Any]
) -> list[jax.Array]:
    """Creates a shard, block by block, on each of the devices."""
    blocks = list(split_block(index, dims, BLOCK_BYTES // np.dtype(dtype).itemsize))
    if len(blocks) == 1:
        # No alias: a step that donates its state must own it.
        block = read(index)
        return jax.block_until_ready([jax.device_put(block, device, may_alias=False) for device in devices])
    arrays = [jnp.zeros([dim.stop - dim.start for dim in index], dtype, device=device) for device in devices]
    for inner in blocks:
        block = read(inner)
        start = np.array([dim.start - outer.start for dim, outer in zip(inner, index)], np.int32)
        arrays = [jax.block_until_ready(_update(array, block, start)) for array in arrays]
    return arrays


@partial(jax.jit, donate_argnums=0)
def _update(array: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, block, list(start))


def split_block(index: Index, dims: Sequence[int], max_elements: int) -> Iterator[Index]:
    """Splits a block along `dims`, the first dim first, until each part has at most `max_elements` elements."""
    size = prod(dim.stop - dim.start for dim in index)
    if size <= max_elements or not dims:
        yield index
        return
    dim, *rest = dims
    start, stop = index[dim].start, index[dim].stop
    length = max(1, max_elements * (stop - start) // size)
    for low in range(start, stop, length):
        inner = slice(low, min(low + length, stop))
        yield from split_block((*index[:dim], inner, *index[dim + 1 :]), rest, max_elements)
