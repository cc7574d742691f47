"""Loads the tensors of a Hugging Face model directly into sharded parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxtrain.errors import UserError
from jaxtrain.interop.safetensors_io import Shapes, StoredTensor, open_tensors
from jaxtrain.interop.sharded_read import read_sharded
from jaxtrain.interop.tensor_slices import Index, TensorMapping, TensorSlice, parameter_slices, tensor_shapes
from jaxtrain.interop.weight_matching import abbreviate

Params = dict[str, Any]
Tensors = dict[str, StoredTensor]
# Buffers that old versions of transformers saved; they are computed here.
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|transformer\.h\.\d+\.attn\.(masked_)?bias")
EMBED_PARAM, HEAD_TENSOR = "embed/table", "lm_head.weight"


def load_weights(folder: Path, mappings: Sequence[TensorMapping], params: Params) -> Params:
    """Loads the parameters of a model; each process reads only its shards, each of them once.

    Needs memory for the shards and three blocks, see `read_sharded`: as read, as stacked, and on a device.

    Args:
        folder: holds the safetensors files.
        mappings: the table of the architecture.
        params: nested dict of ShapeDtypeStructs with shardings; values are rounded to these dtypes.

    Raises:
        UserError: a file cannot be read, a tensor is missing, unexpected or of another shape, or a tied head differs
            from the embedding.
    """
    flat: Params = flatten_dict(params, sep="/")
    slices = parameter_slices(mappings, {path: leaf.shape for path, leaf in flat.items()})
    tensors = add_prefix(open_tensors(folder), mappings)
    embedding = next(mapping.tensor for mapping in mappings if mapping.param == EMBED_PARAM)
    check_tensors(folder, tensors, tensor_shapes(slices), embedding)
    return unflatten_dict({path: _load_param(slices[path], leaf, tensors) for path, leaf in flat.items()}, sep="/")


def add_prefix(tensors: Tensors, mappings: Sequence[TensorMapping]) -> Tensors:
    """Adds the first word of tensor names (`model.`), which models that were saved without their head lack."""
    prefix = mappings[0].tensor.partition(".")[0] + "."
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name == HEAD_TENSOR else prefix + name: tensor for name, tensor in tensors.items()}


def check_tensors(folder: Path, tensors: Tensors, expected: Shapes, embedding: str) -> None:
    """Checks that the files hold exactly the tensors of the model.

    Args:
        folder: holds the files.
        tensors: tensors in the files.
        expected: name -> shape of the tensors of the model.
        embedding: name of the embedding, which a head in the files must equal if the model has tied embeddings.

    Raises:
        UserError: they do not; names the tensors.
    """
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise UserError(f"{folder}: {len(missing)} tensors are missing: {abbreviate(missing)}")
    for name, shape in expected.items():
        tensors[name].check_dtype(name)
        if tensors[name].shape != shape:
            message = f"{name} is {list(tensors[name].shape)}; its config.json makes it {list(shape)}"
            raise UserError(f"{tensors[name].path}: {message}")
    unexpected = [name for name in tensors if name not in expected and not BUFFERS.fullmatch(name)]
    if HEAD_TENSOR in unexpected and embedding in tensors:
        head = tensors[HEAD_TENSOR]
        if not _equal(head, tensors[embedding]):
            message = f"{HEAD_TENSOR} is not {embedding}, though config.json ties them"
            raise UserError(f"{head.path}: {message}; expected tie_word_embeddings false")
        unexpected.remove(HEAD_TENSOR)
    if unexpected:
        raise UserError(f"{folder}: {len(unexpected)} tensors that the model does not have: {abbreviate(unexpected)}")


def _load_param(part: TensorSlice, leaf: jax.ShapeDtypeStruct, tensors: Tensors) -> jax.Array:
    """Loads one parameter in its sharding."""
    stacked, mapping = len(part.stacked_dims), part.mapping
    # Stacked dims are split first, then the dims in the order of the file.
    dims = [*range(stacked), *(mapping.param_dims.index(group[0], stacked) for group in mapping.tensor_dims.split())]
    return read_sharded(leaf, lambda index: read_block(part, index, leaf.dtype, tensors), dims)


def read_block(part: TensorSlice, index: Index, dtype: Any, tensors: Tensors) -> np.ndarray:
    """Reads a block of a parameter from the tensors that it is stacked from."""
    stacked = len(part.stacked_dims)
    block = np.empty([dim.stop - dim.start for dim in index], dtype)
    for position in np.ndindex(*block.shape[:stacked]):
        name = part.tensor_name([dim.start + i for dim, i in zip(index, position)])
        values = part.read(tensors[name], index[stacked:])
        if values.dtype == block.dtype:  # copied as integers: NumPy moves bfloat16 one by one
            block.view(f"u{block.itemsize}")[position] = values.view(f"u{block.itemsize}")
        else:
            block[position] = values
    return block


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Compares two tensors, some rows at a time."""
    if a.shape != b.shape:
        return False
    size, step = a.shape[0], max(1, (1 << 24) // max(a.shape[-1], 1))
    rows = (slice(i, min(i + step, size)) for i in range(0, size, step))
    return all(np.array_equal(a[part], b[part]) for part in rows)
