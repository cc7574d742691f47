"""Slices of Hugging Face tensors that a parameter of the decoder is stacked from.

Letters name dims: L layers, E experts, D embed, H heads, K kv_heads, h head_dim, F mlp, V vocab, P positions. A
parameter stacks over layers (and experts) what Hugging Face stores as one tensor each. Linear weights are [out, in]
in Hugging Face models and [in, out] here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

Index = tuple[slice, ...]
STACKED_DIMS = {"L": "{layer}", "E": "{expert}"}


@dataclass(frozen=True)
class TensorMapping:
    """One row of an architecture's table: a parameter and the Hugging Face tensors that hold it.

    Several mappings may have the same tensor name: their parameters are concatenated, in the order of the table, in
    one fused tensor.

    Attributes:
        param: path of the parameter, e.g. `layers/attention/q`.
        tensor: name of the Hugging Face tensor, with `{layer}` and `{expert}`.
        tensor_dims: letters of its dims, `Hh D`: the first dim holds heads and head_dim.
        param_dims: letters of the parameter's dims, `LDHh`.
        fused_dim: dim of the tensor along which parameters are concatenated.
    """

    param: str
    tensor: str
    tensor_dims: str
    param_dims: str
    fused_dim: int = 0


@dataclass(frozen=True)
class TensorSlice:
    """A mapping with the dim sizes of a model.

    Attributes:
        mapping: row of the architecture's table.
        sizes: dim letter -> size.
        start: first index of the parameter along the tensor's `fused_dim`.
    """

    mapping: TensorMapping
    sizes: dict[str, int]
    start: int

    @property
    def stacked_dims(self) -> str:
        """Letters of the parameter's leading dims over which Hugging Face has separate tensors."""
        return "".join(d for d in self.mapping.param_dims if STACKED_DIMS.get(d, "?") in self.mapping.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice of one tensor."""
        return tuple(prod(self.sizes[d] for d in group) for group in self.mapping.tensor_dims.split())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, index in the stacked dims) of every tensor that the parameter is stacked from."""
        for index in itertools.product(*(range(self.sizes[d]) for d in self.stacked_dims)):
            yield self.tensor_name(index), index

    def tensor_name(self, index: Sequence[int]) -> str:
        """Returns the name of the tensor at an index of the stacked dims."""
        numbers = dict(zip(self.stacked_dims, index))
        return self.mapping.tensor.format(layer=numbers.get("L"), expert=numbers.get("E"))

    def read(self, tensor: Any, index: Index) -> np.ndarray:
        """Reads a block of the parameter's unstacked dims from a tensor.

        Reads only the rows and columns that hold the block. These are more than the block only if a dim that is not
        the first of its group (`head_dim` in `Hh`) is sliced too.

        Args:
            tensor: anything that is indexed with slices, such as `StoredTensor`.
            index: one slice for each unstacked dim of the parameter.
        """
        param_index = dict(zip(self.mapping.param_dims[len(self.stacked_dims) :], index))
        ranges, shape, inner = [], [], []
        for dim, (first, *rest) in enumerate(self.mapping.tensor_dims.split()):
            low, high, _ = param_index[first].indices(self.sizes[first])
            stride = prod(self.sizes[d] for d in rest)
            offset = self.start if dim == self.mapping.fused_dim else 0
            ranges.append(slice(offset + low * stride, offset + high * stride))
            shape += [high - low, *(self.sizes[d] for d in rest)]
            inner += [slice(None), *(param_index[d] for d in rest)]
        block = np.asarray(tensor[tuple(ranges)]).reshape(shape)[tuple(inner)]
        return block.transpose(self._permutation())

    def to_tensor(self, block: np.ndarray) -> np.ndarray:
        """Returns the slice of a tensor that holds a block of all unstacked dims of the parameter."""
        return block.transpose(np.argsort(self._permutation())).reshape(self.shape)

    def _permutation(self) -> list[int]:
        """Returns the tensor's dim of each unstacked dim of the parameter."""
        tensor_dims = self.mapping.tensor_dims.replace(" ", "")
        return [tensor_dims.index(d) for d in self.mapping.param_dims[len(self.stacked_dims) :]]


def parameter_slices(mappings: Sequence[TensorMapping], shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorSlice]:
    """Returns the tensor slice of each parameter of a model; `shapes`: path of a parameter -> its shape."""
    by_param = {mapping.param: mapping for mapping in mappings}
    slices: dict[str, TensorSlice] = {}
    ends: dict[str, int] = {}  # of the slices so far, along the fused dim of each tensor
    for param in sorted(shapes, key=list(by_param).index):
        mapping = by_param[param]
        part = slices[param] = TensorSlice(
            mapping, dict(zip(mapping.param_dims, shapes[param])), ends.get(mapping.tensor, 0)
        )
        ends[mapping.tensor] = part.start + part.shape[mapping.fused_dim]
    return slices


def tensor_shapes(slices: dict[str, TensorSlice]) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every Hugging Face tensor that the parameters are stored in, layer by layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in slices.values():
        for name, _ in part.tensors():
            shape = list(part.shape)
            shape[part.mapping.fused_dim] += part.start
            shapes[name] = tuple(shape)
    return shapes
