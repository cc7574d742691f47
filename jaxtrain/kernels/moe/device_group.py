"""Collectives over the devices along some mesh axes, for code inside a `shard_map`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from jax import Array, lax

from jaxtrain.sharding.sharder import Sharder


@dataclass(frozen=True)
class DeviceGroup:
    """Devices along `axes`, and collectives over them; without axes these do nothing."""

    axes: tuple[str, ...] = ()
    size: int = 1

    @staticmethod
    def along(sharder: Sharder, axes: tuple[str, ...]) -> DeviceGroup:
        """Returns the devices along these axes of the sharder's mesh."""
        shape = {} if sharder.mesh is None else sharder.mesh.shape
        axes = tuple(axis for axis in axes if shape.get(axis, 1) > 1)
        return DeviceGroup(axes, prod(shape[axis] for axis in axes))

    @staticmethod
    def of(sharder: Sharder, name: str) -> DeviceGroup:
        """Returns the devices over which the rules shard a logical name."""
        return DeviceGroup.along(sharder, sharder.axes(name))

    def index(self) -> Array | int:
        """Returns the index of this device in the group."""
        return lax.axis_index(self.axes) if self.axes else 0

    def gather(self, x: Array, dim: int) -> Array:
        """Returns the parts of all devices, concatenated along `dim`."""
        return lax.all_gather(x, self.axes, axis=dim, tiled=True) if self.axes else x

    def scatter(self, x: Array, dim: int) -> Array:
        """Returns this device's part, along `dim`, of the sum over all devices."""
        return lax.psum_scatter(x, self.axes, scatter_dimension=dim, tiled=True) if self.axes else x

    def sum(self, x: Array) -> Array:
        """Returns the sum over all devices."""
        return lax.psum(x, self.axes) if self.axes else x

    def all_to_all(self, x: Array, split: int, concat: int) -> Array:
        """Sends part i along `split` to device i; concatenates what is received along `concat`."""
        return lax.all_to_all(x, self.axes, split, concat, tiled=True) if self.axes else x
