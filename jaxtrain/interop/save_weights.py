"""Our parameters to the tensors of a Hugging Face model, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.interop.safetensors_io import write_tensors
from jaxtrain.interop.tensor_slices import TensorMapping, TensorSlice, parameter_slices, tensor_shapes

Flat = dict[str, jax.Array]


def save_weights(folder: Path, places: Sequence[TensorMapping], params: Flat, dtype: np.dtype, most: int) -> int:
    """Writes the safetensors files (and their index) of a model. Returns the bytes of its tensors.

    Args:
        folder: an existing one.
        places: of the architecture.
        params: path, e.g. `layers/attention/q` -> array, in any sharding of this process's devices. Of each, what one
            tensor holds is brought to the host at a time.
        dtype: of the files; values are rounded to it.
        most: bytes of a file at most.
    """
    found = parameter_slices(places, {path: array.shape for path, array in params.items()})
    makers: dict[str, list[tuple[TensorSlice, tuple[int, ...]]]] = {}
    for part in found.values():
        for name, at in part.tensors():
            makers.setdefault(name, []).append((part, at))
    shapes = tensor_shapes(found)
    shapes = {name: shapes[name] for name in sorted(shapes, key=_order)}
    return write_tensors(folder, shapes, dtype, most, _values(shapes, makers, params, dtype))


def _values(shapes: Any, makers: Any, params: Flat, dtype: np.dtype) -> Iterator[np.ndarray]:
    for name in shapes:
        pieces = [part.give(_slice(params[part.place.path], at).astype(dtype)) for part, at in makers[name]]
        yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces, makers[name][0][0].place.along)


def _slice(array: jax.Array, at: tuple[int, ...]) -> np.ndarray:
    """Returns the values of a parameter at these indices of its first dims, on the host."""
    return np.asarray(_at(array, np.array(at, np.int32)) if at else array)


@jax.jit
def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    """The index is no constant, so that all layers share one program."""
    depth = index.shape[0]
    start = [*index, *(0,) * (array.ndim - depth)]
    block = jax.lax.dynamic_slice(array, start, (1,) * depth + array.shape[depth:])
    return block.reshape(array.shape[depth:])


def _order(name: str) -> tuple[int, int]:
    """The embeddings, the layers in order, the rest; stable within."""
    words = name.split(".")
    if words[1] in ("layers", "h"):
        return 1, int(words[2])
    return (0, 0) if words[1] in ("embed_tokens", "wte", "wpe") else (2, 0)
