"""Digests of the bits of a sharded tree on each device, to find replicas that differ.

The digest of a tensor is a sum modulo 2^32 of its elements as uint32, each times an odd hash of its position in the
shard. A flipped bit always changes it, because an odd number times a power of two below 2^32 is never 0. Swapped
elements change it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.checkpoint.state_tree import flatten


def device_digests(abstract: Any, mesh: Mesh) -> Callable[[Any], jax.Array]:
    """Builds a jitted function: tree -> uint32 [devices, leaves], on every device; devices in the order of the mesh.

    Args:
        abstract: tree of ShapeDtypeStructs with NamedShardings of `mesh`.
        mesh: device mesh.
    """
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract)
    axes = tuple(mesh.axis_names)

    def local(tree: Any) -> jax.Array:
        return jnp.stack([bit_sum(leaf) for leaf in jax.tree.leaves(tree)])[None, :]

    sums = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(axes, None), check_vma=False)
    return jax.jit(sums, out_shardings=jax.sharding.NamedSharding(mesh, PartitionSpec()))


def bit_sum(x: jax.Array) -> jax.Array:
    """Returns the digest of an array of any shape and dtype, a uint32 scalar."""
    bits = _bits(x).reshape(-1)
    index = jax.lax.iota(jnp.uint32, bits.size)
    mixed = (index ^ (index >> 15)) * jnp.uint32(0x2C1B3C6D)
    return jnp.sum(bits * ((mixed ^ (mixed >> 12)) | jnp.uint32(1)), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    size = x.dtype.itemsize
    if size == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)  # adds a dim of two
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]).astype(jnp.uint32)


def differing_replicas(sums: np.ndarray, abstract: Any, mesh: Mesh) -> list[tuple[str, list[int]]]:
    """Returns tensors whose replicas differ: (name, mesh positions of the devices that differ from the majority).

    Without a majority it returns all holders of the shard.

    Args:
        sums: result of `device_digests`.
        abstract: tree of ShapeDtypeStructs with NamedShardings of `mesh`.
        mesh: device mesh.
    """
    position = {device: index for index, device in enumerate(mesh.devices.flat)}
    differing = []
    for column, (name, leaf) in enumerate(flatten(abstract).items()):
        holders: dict[Any, list[int]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            holders.setdefault(str(index), []).append(position[device])
        devices = [device for group in holders.values() for device in _minority(group, sums[:, column])]
        if devices:
            differing.append((name, sorted(devices)))
    return differing


def _minority(group: list[int], sums: np.ndarray) -> list[int]:
    counts = Counter(int(sums[device]) for device in group)
    if len(counts) == 1:
        return []
    (common, most), *_ = counts.most_common()
    return [device for device in group if 2 * most <= len(group) or int(sums[device]) != common]
