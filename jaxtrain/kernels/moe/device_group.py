"""The devices along some mesh axes, as code inside a `shard_map` talks to them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from jax import Array, lax

from jaxtrain.sharding.sharder import Sharder


@dataclass(frozen=True)
class Group:
    """Collectives over `axes`; without axes they do nothing."""

    axes: tuple[str, ...] = ()
    size: int = 1

    @staticmethod
    def along(sharder: Sharder, axes: tuple[str, ...]) -> Group:
        """The devices along these axes of the sharder's mesh."""
        shape = {} if sharder.mesh is None else sharder.mesh.shape
        axes = tuple(axis for axis in axes if shape.get(axis, 1) > 1)
        return Group(axes, prod(shape[axis] for axis in axes))

    @staticmethod
    def of(sharder: Sharder, name: str) -> Group:
        """The devices over which the rules split a logical name."""
        return Group.along(sharder, sharder.axes(name))

    def index(self) -> Array | int:
        """Place of this device."""
        return lax.axis_index(self.axes) if self.axes else 0

    def gather(self, x: Array, dim: int) -> Array:
        """The parts of all devices, one after the other along `dim`."""
        return lax.all_gather(x, self.axes, axis=dim, tiled=True) if self.axes else x

    def scatter(self, x: Array, dim: int) -> Array:
        """Returns this device's part of the sum, along `dim`."""
        return lax.psum_scatter(x, self.axes, scatter_dimension=dim, tiled=True) if self.axes else x

    def sum(self, x: Array) -> Array:
        """The sum over all devices."""
        return lax.psum(x, self.axes) if self.axes else x

    def swap(self, x: Array, split: int, concat: int) -> Array:
        """All-to-all: part i along `split` goes to device i; what arrives lies along `concat`."""
        return lax.all_to_all(x, self.axes, split, concat, tiled=True) if self.axes else x
