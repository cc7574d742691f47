"""Saves parameters as the tensors of a Hugging Face model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxtrain.interop.safetensors_io import write_tensors
from jaxtrain.interop.tensor_slices import TensorMapping, TensorSlice, parameter_slices, tensor_shapes


def save_weights(
    folder: Path, mappings: Sequence[TensorMapping], params: dict[str, jax.Array], dtype: np.dtype, max_bytes: int
) -> int:
    """Writes the safetensors files of a model and their index. Brings one tensor at a time to the host.

    Args:
        folder: an existing folder.
        mappings: the table of the architecture.
        params: path, e.g. `layers/attention/q` -> array, in any sharding over devices of this process.
        dtype: dtype in the files; values are rounded to it.
        max_bytes: maximum bytes of a file.

    Returns:
        Bytes of all tensors.
    """
    slices = parameter_slices(mappings, {path: array.shape for path, array in params.items()})
    sources: dict[str, list[tuple[TensorSlice, tuple[int, ...]]]] = defaultdict(list)
    for part in slices.values():
        for name, index in part.tensors():
            sources[name].append((part, index))

    def value(name: str) -> np.ndarray:
        parts = [part.to_tensor(_layer(params[part.mapping.param], i).astype(dtype)) for part, i in sources[name]]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, sources[name][0][0].mapping.fused_dim)

    shapes = dict(sorted(tensor_shapes(slices).items(), key=lambda item: _sort_key(item[0])))
    return write_tensors(folder, shapes, dtype, max_bytes, map(value, shapes))


def _layer(array: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Returns the values of a parameter at an index of its leading dims, on the host."""
    return np.asarray(_dynamic_index(array, np.array(index, np.int32)) if index else array)


@jax.jit
def _dynamic_index(array: jax.Array, index: jax.Array) -> jax.Array:
    """Indexes the leading dims. The index is traced, so that all layers share one compiled program."""
    depth = index.shape[0]
    start = [*index, *(0,) * (array.ndim - depth)]
    block = jax.lax.dynamic_slice(array, start, (1,) * depth + array.shape[depth:])
    return block.reshape(array.shape[depth:])


def _sort_key(name: str) -> tuple[int, int]:
    """Sorts embeddings first, then the layers by number, then the rest."""
    words = name.split(".")
    if words[1] in ("layers", "h"):
        return 1, int(words[2])
    return (0, 0) if words[1] in ("embed_tokens", "wte", "wpe") else (2, 0)
