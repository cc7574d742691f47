"""Initial values of a model's variables from a tree of arrays in memory, or from safetensors files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.interop.safetensors_io import open_file, open_tensors
from jaxtrain.interop.sharded_read import read_sharded
from jaxtrain.interop.tensor_slices import Index
from jaxtrain.interop.weight_matching import Shape, StoredName


class ArrayWeights:
    """Named arrays, of which every process reads the blocks of its shards.

    Attributes:
        source: name of the place, for messages.
        shapes: name -> shape.
    """

    def __init__(self, source: str, arrays: Mapping[str, Any]):
        """Keeps the arrays: anything with a `shape` that is indexed with slices."""
        self.source, self._arrays = source, arrays
        self.shapes: dict[str, Shape] = {name: tuple(array.shape) for name, array in arrays.items()}

    def load(
        self, found: Mapping[str, StoredName], variables: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Returns the variables, see `StoredWeights.load`."""
        return {path: self._load(place, variables[path]) for path, place in found.items()}

    def _load(self, place: StoredName, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        # Of an array on devices one copy is on the host at a time.
        arrays = [self._arrays[name] for name in place.names]
        arrays = [np.asarray(array) if isinstance(array, jax.Array) else array for array in arrays]
        dims = [dim + place.is_stacked for dim in np.argsort(place.dims)]
        return read_sharded(
            leaf, partial(_read_block, arrays, place, leaf.dtype), [0, *dims] if place.is_stacked else dims
        )

    def digest(self) -> bytes:
        """Returns the SHA-256 of all names, shapes, dtypes and values."""
        digest = hashlib.sha256()
        for name in sorted(self._arrays):
            value = np.ascontiguousarray(self._arrays[name])
            digest.update(f"{name} {value.dtype} {value.shape} ".encode())
            digest.update(value.reshape(-1).view(np.uint8).data)
        return digest.digest()


def _read_block(arrays: list[Any], place: StoredName, dtype: Any, index: Index) -> np.ndarray:
    """Reads a block of a variable from the arrays that hold it."""

    def read(array: Any, index: Index) -> np.ndarray:
        stored = tuple(index[place.dims.index(dim)] for dim in range(len(index)))
        return np.asarray(array[stored or ...]).transpose(place.dims).astype(dtype)

    if not place.is_stacked:
        return read(arrays[0], index)
    return np.stack([read(array, index[1:]) for array in arrays[index[0]]])


def tree_weights(tree: Any, source: str) -> ArrayWeights:
    """Returns the arrays of a module or of a pytree of arrays, by path. Random streams are left out.

    Raises:
        UserError: a leaf is no array, or this process does not hold the whole of it.
    """
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Not(nnx.RngState))
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            raise UserError(f"{source}: {name} is a {type(leaf).__name__}; expected arrays")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise UserError(f"{source}: {name} lies on other processes, too; expected arrays that each process holds")
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            arrays[name] = leaf
    return ArrayWeights(source, arrays)


def safetensors_weights(path: Path) -> ArrayWeights:
    """Opens a safetensors file, or all those of a folder.

    Raises:
        ModelFileError: no such files, or a damaged one.
    """
    return ArrayWeights(str(path), open_tensors(path) if path.is_dir() else open_file(path))
