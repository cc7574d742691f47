"""Slices of Hugging Face tensors that hold a parameter of the decoder.

Letters name dims: L layers, E experts, D embed, H heads, K kv_heads, h head_dim, F mlp, V vocab, P positions. A
parameter stacks what Hugging Face keeps in one tensor for each layer (and expert), and Linear weights there are
[out, in].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

Index = tuple[slice, ...]
STACKED = {"L": "{layer}", "E": "{expert}"}


@dataclass(frozen=True)
class TensorMapping:
    """A row of an architecture's table.

    path: of the parameter, e.g. `layers/attention/q`; ours: letters of its dims, `LDHh`.
    name: of the Hugging Face tensor, with `{layer}` and `{expert}`; dims: letters of its dims, `Hh D`: the first holds
    heads and head_dim. Places of one name follow each other along a dim of a fused tensor: the first, or `along`.
    """

    path: str
    name: str
    dims: str
    ours: str
    along: int = 0


@dataclass(frozen=True)
class TensorSlice:
    """A place with the sizes of a model: `start` is its first row (or column, by `along`) in the tensor, `shape` what
    it has of it."""

    place: TensorMapping
    sizes: dict[str, int]
    start: int

    @property
    def stack(self) -> str:
        """Letters of the dims that Hugging Face keeps as separate tensors; the first ones of ours."""
        return "".join(letter for letter in self.place.ours if STACKED.get(letter, "?") in self.place.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this part of the tensor."""
        return tuple(prod(self.sizes[letter] for letter in group) for group in self.place.dims.split())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, indices of the stacked dims) of every tensor that the parameter is stacked from."""
        for at in itertools.product(*(range(self.sizes[letter]) for letter in self.stack)):
            yield self.named(at), at

    def named(self, at: Sequence[int]) -> str:
        """Name of the tensor at these indices of the stacked dims."""
        found = dict(zip(self.stack, at))
        return self.place.name.format(layer=found.get("L"), expert=found.get("E"))

    def take(self, tensor: Any, index: Index) -> np.ndarray:
        """A block of the parameter's unstacked dims, read out of a tensor that can be sliced.

        Only the rows and columns are touched that hold the block: no more than the block itself, but where a dim
        behind the first of a group (`head_dim`) is split too.
        """
        wanted = dict(zip(self.place.ours[len(self.stack) :], index))
        ranges, shape, inner = [], [], []
        for number, group in enumerate(self.place.dims.split()):
            low, high = _ends(wanted[group[0]], self.sizes[group[0]])
            rest = prod(self.sizes[letter] for letter in group[1:])
            first = self.start if number == self.place.along else 0
            ranges.append(slice(first + low * rest, first + high * rest))
            shape += [high - low, *(self.sizes[letter] for letter in group[1:])]
            inner += [slice(None), *(wanted[letter] for letter in group[1:])]
        block = np.asarray(tensor[tuple(ranges)]).reshape(shape)[tuple(inner)]
        return block.transpose(self._order())

    def give(self, block: np.ndarray) -> np.ndarray:
        """The inverse: the part of the tensor, of all of the parameter's unstacked dims."""
        return block.transpose(np.argsort(self._order())).reshape(self.shape)

    def _order(self) -> list[int]:
        """Returns the tensor's dim for each of our unstacked dims."""
        theirs = self.place.dims.replace(" ", "")
        return [theirs.index(letter) for letter in self.place.ours[len(self.stack) :]]


def parameter_slices(places: Sequence[TensorMapping], shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorSlice]:
    """path -> part of every parameter of a model; fused tensors are counted out in the order of the places."""
    by_path = {place.path: place for place in places}
    order = [place.path for place in places]
    rows: dict[str, int] = {}
    found = {}
    for path in sorted(shapes, key=order.index):
        place = by_path[path]
        part = TensorSlice(place, dict(zip(place.ours, shapes[path])), rows.get(place.name, 0))
        rows[place.name] = part.start + part.shape[place.along]
        found[path] = part
    return found


def tensor_shapes(found: dict[str, TensorSlice]) -> dict[str, tuple[int, ...]]:
    """name -> shape of every tensor that the parameters make up, layer by layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in found.values():
        for name, _ in part.tensors():
            size = list(part.shape)
            size[part.place.along] += part.start
            shapes[name] = tuple(size)
    return shapes


def _ends(index: slice, size: int) -> tuple[int, int]:
    return index.start or 0, size if index.stop is None else index.stop
