"""Copies of the state that training cannot touch: dispatched in milliseconds, finished while the next step runs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding


def snapshot(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Host copies of fully addressable arrays, one replica of each, safe against donation of the originals.

    The copy is asynchronous: the runtime orders it after the computation that makes an array and before any that
    reuses its buffer, so that the caller waits for neither. Replicated arrays are copied once, whatever the number
    of devices. Nothing is compiled.

    Returns: the same names, shapes, dtypes and shard boundaries, over the devices of the first replica; in
      `pinned_host` memory on accelerators.
    """
    views, targets = [], []
    for array in arrays.values():
        sharding, shards = _first_replica(array)
        views.append(jax.make_array_from_single_device_arrays(array.shape, sharding, shards))
        targets.append(_on_host(sharding))
    copies = jax.device_put(views, targets, may_alias=False)
    return dict(zip(arrays, copies))


def _first_replica(array: jax.Array) -> tuple[Sharding, list[jax.Array]]:
    """A sharding over the devices that hold replica 0, and their shards in the order of that sharding."""
    size = array.sharding.shard_shape(array.shape)
    grid_shape = tuple(dim // part if part else 1 for dim, part in zip(array.shape, size))
    shards: dict[tuple[int, ...], jax.Array] = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            shards[tuple((dim.start or 0) // part if part else 0 for dim, part in zip(shard.index, size))] = shard.data
    if not grid_shape:
        (only,) = shards.values()
        return SingleDeviceSharding(next(iter(only.devices()))), [only]
    devices = np.empty(grid_shape, dtype=object)
    for position, data in shards.items():
        devices[position] = next(iter(data.devices()))
    names = tuple(f"dim{i}" for i in range(len(grid_shape)))
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, PartitionSpec(*names)), [shards[position] for position in np.ndindex(*grid_shape)]


def _on_host(sharding: Any) -> Sharding:
    """The same sharding in pinned host memory; unchanged where device memory is host memory already."""
    device = next(iter(sharding.device_set))
    return sharding if device.platform == "cpu" else sharding.with_memory_kind("pinned_host")


def rematerialise(flat: dict[str, jax.Array]) -> None:
    """Replaces, in place and one by one, arrays on CPU devices by copies whose buffers can be donated.

    Freshly read CPU arrays may alias NumPy memory of the reader, which XLA must not reuse: 5-27% of the buffers were
    not donated. Accelerators always copy into buffers of their own, so nothing is done there. The original is deleted
    before the next copy: one tensor more than the state is alive at a time.
    """
    for name, array in flat.items():
        if next(iter(array.sharding.device_set)).platform != "cpu":
            continue
        copy = jax.block_until_ready(jax.device_put(array, array.sharding, may_alias=False))
        flat[name] = copy
        array.delete()
