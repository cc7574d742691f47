"""Collectives over the mesh axis of the replicas in which every device of a replica sends its own part.

That is `replica`, or `data` of a mesh with one replica. In code that is manual over it alone, every device of a replica
would run a collective on the whole array: eight devices would send the same eight times. These are manual over all
axes, on arrays that are split over the devices of a replica first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.config.sections.sync import exchange_axis

SAME = PartitionSpec()  # values that all replicas hold


def replica_axis(mesh: Mesh) -> str:
    """Returns the mesh axis along which these collectives send."""
    return exchange_axis(mesh.shape)


def replica_count(mesh: Mesh) -> int:
    """Returns the size of that axis."""
    return mesh.shape[replica_axis(mesh)]


def stacked(mesh: Mesh, *inner: Any) -> PartitionSpec:
    """Returns the PartitionSpec of values with a leading replica dim, and axes of the dims after it."""
    return PartitionSpec(replica_axis(mesh), *inner)


def inner_devices(mesh: Mesh | None) -> int:
    """Returns the number of devices of a replica."""
    return 1 if mesh is None else mesh.size // replica_count(mesh)


def inner_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes within a replica."""
    return tuple(axis for axis in mesh.axis_names if axis != replica_axis(mesh))


def on_each_replica(mesh: Mesh, body: Callable[..., Any], in_specs: Any = None, out_specs: Any = None) -> Any:
    """Returns a `shard_map` over the replicas' axis alone: the partitioner cannot send anything between replicas.

    Args:
        mesh: the mesh.
        body: computes with the values of one replica.
        in_specs: of its arguments; None: they have a leading replica dim.
        out_specs: of its results, likewise.
    """
    each, axes = stacked(mesh), frozenset({replica_axis(mesh)})
    specs = [each if given is None else given for given in (in_specs, out_specs)]
    return jax.shard_map(
        body, mesh=mesh, in_specs=specs[0], out_specs=specs[1], axis_names=axes, check_vma=False
    )  # fmt: skip


def on_each_device(mesh: Mesh, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """Returns a `shard_map` over all axes, for code that sends along that of the replicas."""
    axes = frozenset(mesh.axis_names)
    return jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
    )  # fmt: skip


def pad_to_devices(x: jax.Array, dim: int, inner: int) -> jax.Array:
    """Returns an array filled with zeros along a dim, so that the devices of a replica divide it."""
    size = x.shape[dim]
    return jnp.pad(x, [(0, padded(size, inner) - size if i == dim else 0) for i in range(x.ndim)])


def padded(size: int, inner: int) -> int:
    """Returns the size of a dim after `pad_to_devices`."""
    return ceil(size / inner) * inner


def flat_mean(arrays: Sequence[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """Returns the means over replicas of float32 arrays [replicas, ...], in one all-reduce."""
    if not arrays:
        return []
    inner, spec = inner_devices(mesh), PartitionSpec(inner_axes(mesh))

    def pack(arrays: list[jax.Array]) -> jax.Array:
        return pad_to_devices(jnp.concatenate([x.reshape(-1) for x in arrays]), 0, inner)[None]

    def mean(flat: jax.Array) -> jax.Array:
        return jax.lax.psum(flat[0], replica_axis(mesh)) / replica_count(mesh)

    packed = on_each_replica(mesh, pack)(list(arrays))
    flat = on_each_device(mesh, mean, stacked(mesh, *spec), spec)(packed)
    shapes = [x.shape[1:] for x in arrays]
    return on_each_replica(mesh, lambda flat: split_flat(flat, shapes), SAME, SAME)(flat)


def flat_mean_bytes(sizes: Sequence[int], replicas: int, inner: int) -> float:
    """Returns the bytes that a replica sends for `flat_mean` of arrays of these sizes, by a ring all-reduce."""
    return 2 * 4 * padded(sum(sizes), inner) * (replicas - 1) / replicas


def gather_flat(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns an array [replicas, values], filled up, with the values of all on every replica, in one all-gather."""
    axes = inner_axes(mesh)
    padded_x = on_each_replica(mesh, partial(pad_to_devices, dim=1, inner=inner_devices(mesh)))(x)

    def gather(own: jax.Array) -> jax.Array:
        return jax.lax.all_gather(own[0], replica_axis(mesh))

    return on_each_device(mesh, gather, stacked(mesh, axes), PartitionSpec(None, axes))(padded_x)


def split_flat(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Returns the arrays of these shapes that lie one after the other in the last dim of `flat`."""
    found, start = [], 0
    for shape in shapes:
        size = prod(shape)
        found.append(flat[..., start : start + size].reshape(*flat.shape[:-1], *shape))
        start += size
    return found
