"""Gathers of weights that are stored in shards: in 8 bits, or in two stages, of which the second stays in a node.

As ZeRO++ (Wang et al. 2023, arXiv 2306.10209): qwZ sends weights as blocks of int8 with a scale each; hpZ keeps what
the devices of a node hold together after the first stage for the backward pass, which then gathers within the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from jaxtrain.sharding.quantized_blocks import pack, unpack
from jaxtrain.sharding.rules import FSDP_AXIS, Dims

BLOCK = 128  # most values with one scale
SMALLEST_BLOCK = 16  # a row that has no blocks of this many values travels as it is
SMALLEST = 1024  # values of a weight that is worth it
BITS = 8  # of a value
SHARDS = "weight_shards"  # `checkpoint_name` of what the backward pass gathers


@dataclass(frozen=True)
class WeightGather:
    """Options of the gathers of weights for use.

    Attributes:
        in_blocks: as int8, with a scale for each block.
        secondary: devices of the axis `fsdp`, one after the other, that hold a copy together from which the backward
            pass gathers; 0: none.
    """

    in_blocks: bool = False
    secondary: int = 0

    def plan(self, stored: Dims, used: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> GatherPlan | None:
        """Returns how a weight is gathered; None if that is as without these options.

        Args:
            stored: mesh axes of each of its dims before.
            used: after it.
            shape: sizes of the dims.
            sizes: of the mesh axes.
        """
        before, after = (tuple(tuple(a for a in dim if sizes[a] > 1) for dim in dims) for dims in (stored, used))
        changed = [dim for dim, axes in enumerate(before) if axes != after[dim]]
        if len(changed) != 1 or after[changed[0]] or prod(shape) < SMALLEST:
            return None
        axes = before[changed[0]]
        row = shape[-1] // prod(sizes[axis] for axis in before[-1])
        block = max(n for n in range(1, min(row, BLOCK) + 1) if row % n == 0)
        block = block if self.in_blocks and block >= SMALLEST_BLOCK else 0
        inside = self.secondary if axes == (FSDP_AXIS,) else 0
        if not block and not inside:
            return None
        return GatherPlan(before, after, changed[0], axes, prod(sizes[axis] for axis in axes), block, inside)


PLAIN = WeightGather()


@dataclass(frozen=True)
class GatherPlan:
    """Gather of one weight.

    Attributes:
        stored: mesh axes of each dim before.
        used: after it.
        dim: the dim that is gathered.
        axes: mesh axes along which it is.
        shards: number of its shards.
        block: values with one scale; 0: it travels in the dtype of the computation.
        inside: devices that hold a copy together; 0: there is one stage.
    """

    stored: Dims
    used: Dims
    dim: int
    axes: tuple[str, ...]
    shards: int
    block: int
    inside: int

    @property
    def packed(self) -> Dims:
        """Mesh axes of each dim of what `before` returns."""
        stages = (self.axes, ()) if self.inside else (self.axes,)
        return (*self.stored[: self.dim], *stages, *self.stored[self.dim + 1 :], *(((),) if self.block else ()))

    def before(self, x: jax.Array) -> jax.Array:
        """Returns what a device has to gather from, for the shard of a weight that it stores."""
        x = pack(x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.block), BITS) if self.block else x
        if not self.inside:
            return x
        across = [[*range(first, self.shards, self.inside)] for first in range(self.inside)]
        return jax.lax.all_gather(x, self.axes, axis_index_groups=across, axis=self.dim)

    def after(self, x: jax.Array) -> jax.Array:
        """Returns a device's part of the weight for use."""
        dim, groups = self.dim, None
        if self.inside:
            dim += 1
            groups = [[*range(first, first + self.inside)] for first in range(0, self.shards, self.inside)]
        x = jax.lax.all_gather(x, self.axes, axis_index_groups=groups, axis=dim)
        x = unpack(x, BITS) if self.block else x
        rest = x.shape[dim + 2 : x.ndim - 1 if self.block else x.ndim]  # after the gathered dim, without blocks
        if not self.block:
            return x.reshape(*x.shape[: self.dim], -1, *rest)
        if self.dim == len(self.stored) - 1:
            return x.reshape(*x.shape[: self.dim], -1)
        return x.reshape(*x.shape[: self.dim], -1, *rest[:-1], rest[-1] * self.block)
