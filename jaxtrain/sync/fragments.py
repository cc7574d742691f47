"""Fragments of the parameters, which are exchanged at different times, and the chunks in which each of them travels.

Both are functions of shapes and logical names alone, so that what is in flight means the same on every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.errors import UserError
from jaxtrain.sharding.rules import LAYERS, REPLICA_AXIS
from jaxtrain.sync import quantized_mean

Tree = Any
Parts = dict[str, jax.Array]
MOST_SHARDS = 64  # shards of a dim that can be cut into chunks without sending values between them
WASTE = 0.02  # zeros that may travel for that, as a share


@dataclass(frozen=True)
class Parameter:
    """One parameter and its parts: every `fragments`-th layer of a stack, or the whole in a single fragment.

    Attributes:
        shape: its shape.
        fragments: fragments over which its layers are spread; 0: it is no stack.
        home: the fragment of one that is no stack.
        chunks: chunks of a fragment.
        cut: dim of the part that is cut into chunks, and its number of shards of which each is cut; None: the part is
            small, and travels packed with others.
    """

    shape: tuple[int, ...]
    fragments: int
    home: int
    chunks: int
    cut: tuple[int, int] | None

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of the part of a fragment; of a stack whose layers do not divide it is filled with zeros."""
        return (ceil(self.shape[0] / self.fragments), *self.shape[1:]) if self.fragments else self.shape

    def is_in(self, fragment: int) -> bool:
        """Returns whether a fragment has a part of the parameter."""
        return fragment < self.shape[0] if self.fragments else fragment == self.home

    def take(self, x: jax.Array, fragment: int) -> jax.Array:
        """Returns the part of a fragment."""
        return self._apart(x)[:, fragment] if self.fragments else x

    def put(self, x: jax.Array, fragment: int, part: jax.Array) -> jax.Array:
        """Returns the parameter with another part of a fragment."""
        if not self.fragments:
            return part.astype(x.dtype)
        apart = self._apart(x).at[:, fragment].set(part.astype(x.dtype))
        return apart.reshape(-1, *self.shape[1:])[: self.shape[0]]

    def _apart(self, x: jax.Array) -> jax.Array:
        """Returns layers as [layers of a fragment, fragments, ...]."""
        rows = self.part[0]
        x = jnp.pad(x, [(0, rows * self.fragments - len(x)), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(rows, self.fragments, *self.shape[1:])

    @property
    def axis(self) -> int:
        """Dim of `layout` that counts the chunks."""
        return self._cut[0] + 1

    @property
    def layout(self) -> tuple[int, ...]:
        """Shape of a part that is cut: its dim becomes [shards, chunks, values of a chunk]."""
        (dim, shards), part = self._cut, self.part
        return (*part[:dim], shards, self.chunks, ceil(part[dim] / shards / self.chunks), *part[dim + 1 :])

    @property
    def chunk(self) -> jax.ShapeDtypeStruct:
        """Shape of a chunk."""
        layout = self.layout
        return jax.ShapeDtypeStruct((*layout[: self.axis], *layout[self.axis + 1 :]), jnp.float32)

    @property
    def _cut(self) -> tuple[int, int]:
        assert self.cut is not None
        return self.cut

    def cut_part(self, part: jax.Array) -> jax.Array:
        """Returns a part as `layout`."""
        (dim, shards), layout = self._cut, self.layout
        x = part.reshape(*part.shape[:dim], shards, -1, *part.shape[dim + 1 :])
        fill = [(0, 0)] * x.ndim
        fill[dim + 1] = (0, self.chunks * layout[dim + 2] - x.shape[dim + 1])
        return jnp.pad(x, fill).reshape(layout)

    def join(self, x: jax.Array) -> jax.Array:
        """Reverses `cut_part`."""
        (dim, shards), part = self._cut, self.part
        x = x.reshape(*x.shape[:dim], shards, -1, *part[dim + 1 :])
        return jax.lax.slice_in_dim(x, 0, part[dim] // shards, axis=dim + 1).reshape(part)

    def spec(self, sharding: Any) -> PartitionSpec:
        """Returns the sharding of `layout` for that of the parameter: of its dims where they are divisible."""
        sizes = sharding.mesh.shape
        axes = [*sharding.spec, *[None] * (len(self.shape) - len(sharding.spec))]

        def shards(d: int) -> int:
            names = axes[d] if isinstance(axes[d], tuple) else (axes[d],)
            return prod(sizes[name] for name in names if name is not None)

        if self.fragments and self.part[0] % shards(0):
            axes[0] = None
        (dim, grain), found = self._cut, axes
        width = self.layout[dim + 2]
        over = [found[dim], None, None] if grain % shards(dim) == 0 else [None, None, found[dim]]
        if over[0] is None and width % shards(dim):
            over = [None, None, None]
        return PartitionSpec(*found[:dim], *over, *found[dim + 1 :])

    def part_spec(self, sharding: Any) -> PartitionSpec:
        """Returns the sharding of a part that is a single chunk."""
        return PartitionSpec(*self.spec(sharding)[2:]) if self.cut else PartitionSpec()


class Fragments:
    """The fragments of a model: layers of its stacks by turns, and other parameters so that fragments are equal.

    Args:
        params: shapes of the parameters, with shardings if there are several replicas.
        names: their logical names.
        count: fragments.
        chunks: chunks of each.
    """

    def __init__(self, params: Tree, names: Tree, count: int, chunks: int) -> None:
        self.count, self.chunks = count, chunks
        leaves, self._structure = jax.tree.flatten(params)
        self._params = params
        paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in _leaves(params)]
        stacked = [each[:1] == (LAYERS,) for each in self._structure.flatten_up_to(names)]
        shapes = dict(zip(paths, (tuple(leaf.shape) for leaf in leaves)))
        stacks = {path: shapes[path] for path, is_stack in zip(paths, stacked) if is_stack}
        self._check(stacks, len(paths))
        homes = _homes({path: shape for path, shape in shapes.items() if path not in stacks}, stacks, count)
        self.parameters: dict[str, Parameter] = {}
        for path, shape in shapes.items():
            spread = count if path in stacks else 0
            part = (ceil(shape[0] / count), *shape[1:]) if spread else shape
            cut = _cut(part, chunks, first=1 if spread and len(shape) > 2 else 0)
            self.parameters[path] = Parameter(shape, spread, homes.get(path, 0), chunks, cut)

    def _check(self, stacks: Mapping[str, tuple[int, ...]], parameters: int) -> None:
        most = max((shape[0] for shape in stacks.values()), default=parameters)
        if self.count > most:
            what = "layers in a stack" if stacks else "parameters, and no stack of layers"
            message = f"{self.count} fragments of a model with {most} {what}; expected at most {most}"
            raise UserError(f"sync.streaming.fragments: {message}, a divisor of sync.every")

    def paths(self, fragment: int) -> list[str]:
        """Returns the parameters of which a fragment has a part."""
        return [path for path, one in self.parameters.items() if one.is_in(fragment)]

    def cut_paths(self, fragment: int) -> tuple[str, ...]:
        """Returns those of a fragment that are cut into chunks."""
        return tuple(path for path in self.paths(fragment) if self.parameters[path].cut)

    def packed_paths(self, fragment: int) -> list[str]:
        """Returns those of a fragment that travel packed."""
        return [path for path in self.paths(fragment) if not self.parameters[path].cut]

    @cached_property
    def pack_width(self) -> int:
        """Values of a chunk of the packed parameters."""
        sizes = (
            sum(prod(self.parameters[path].part) for path in self.packed_paths(fragment))
            for fragment in range(self.count)
        )
        return ceil(max(sizes) / self.chunks)

    def take(self, tree: Tree, fragment: int) -> Parts:
        """Returns the parts of a fragment."""
        leaves = dict(zip(self.parameters, self._structure.flatten_up_to(tree)))
        return {path: self.parameters[path].take(leaves[path], fragment) for path in self.paths(fragment)}

    def put(self, tree: Tree, fragment: int, parts: Parts) -> Tree:
        """Returns a tree with other parts of a fragment."""
        leaves = dict(zip(self.parameters, self._structure.flatten_up_to(tree)))
        for path, part in parts.items():
            leaves[path] = self.parameters[path].put(leaves[path], fragment, part)
        return self._structure.unflatten(leaves.values())

    def leaves(self, tree: Tree) -> dict[str, Any]:
        """Returns the leaves of a tree like the parameters, by their paths."""
        return dict(zip(self.parameters, self._structure.flatten_up_to(tree)))

    def pack(self, parts: Parts, fragment: int) -> jax.Array:
        """Returns small parts in chunks, [chunks, values]."""
        flat = [parts[path].reshape(-1) for path in self.packed_paths(fragment)]
        values = jnp.concatenate([*flat, jnp.zeros(0, jnp.float32)])
        size = self.chunks * self.pack_width
        return jnp.pad(values, (0, size - len(values))).reshape(self.chunks, self.pack_width)

    def unpack(self, pack: jax.Array, fragment: int) -> Parts:
        """Reverses `pack`."""
        values, start, found = pack.reshape(-1), 0, {}
        for path in self.packed_paths(fragment):
            shape = self.parameters[path].part
            found[path] = values[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        return found

    def specs(self, *before: str | None) -> dict[str, PartitionSpec]:
        """Returns the shardings of what is cut, with a replica dim and others in front."""
        given = self.leaves(self._params)
        cut = {path: one for path, one in self.parameters.items() if one.cut}
        return {
            path: PartitionSpec(REPLICA_AXIS, *before, *one.spec(given[path].sharding)) for path, one in cut.items()
        }

    def chunk_spec(self, path: str) -> PartitionSpec:
        """Returns the sharding of a chunk."""
        one = self.parameters[path]
        spec = one.spec(self.leaves(self._params)[path].sharding)
        return PartitionSpec(*spec[: one.axis], *spec[one.axis + 1 :])


def _leaves(tree: Tree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _homes(others: Mapping[str, tuple[int, ...]], stacks: Mapping[str, tuple[int, ...]], count: int) -> dict[str, int]:
    """Returns the fragments of parameters that are no stacks: the largest first, each to the smallest fragment."""
    sizes = [sum(len(range(i, s[0], count)) * prod(s[1:]) for s in stacks.values()) for i in range(count)]
    homes = {}
    for path in sorted(others, key=lambda path: -prod(others[path])):
        homes[path] = sizes.index(min(sizes))
        sizes[homes[path]] += prod(others[path])
    return homes


def _cut(part: tuple[int, ...], chunks: int, first: int) -> tuple[int, int] | None:
    """Returns the dim along which a part is cut, and the shards of it that are cut each.

    The last dim is kept, because blocks with one scale lie along it, and so are dims before `first`. Parts of which a
    chunk would be too small to be quantised are not cut.
    """
    if chunks == 1:
        return (0, 1) if part else None
    dims = [d for d in range(first, len(part) - 1) if part[d] >= chunks]
    if prod(part) < chunks * quantized_mean.SMALLEST or not dims:
        return None

    def waste(dim: int, shards: int) -> float:
        size = part[dim]
        return ceil(size / shards / chunks) * chunks * shards / size - 1

    powers = [2**n for n in range(MOST_SHARDS.bit_length())]
    options = [(dim, shards) for dim in dims for shards in powers if part[dim] % shards == 0]
    small = [option for option in options if waste(*option) <= WASTE]
    if small:
        return max(small, key=lambda option: (option[1], part[option[0]]))
    return min(options, key=lambda option: (waste(*option), -option[1]))
