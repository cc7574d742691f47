"""Tensors of a Hugging Face model straight into the shards of our parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop.safetensors_io import Entry, open_tensors
from jaxtrain.interop.tensor_slices import Index, TensorMapping, TensorSlice, parameter_slices, tensor_shapes

Tree = dict[str, Any]
# Computed, but saved by old versions.
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|transformer\.h\.\d+\.attn\.(masked_)?bias")
PIECE = 8 << 20  # bytes of a parameter that are on the host at a time
TABLE, HEAD = "embed/table", "lm_head.weight"


def load_weights(folder: Path, places: Sequence[TensorMapping], params: Tree) -> Tree:
    """The parameters, each shard read once and by itself, in pieces of at most `PIECE` bytes.

    Besides the shards two pieces are held: one on the host and its copy on a device.

    Args:
        folder: with the safetensors files.
        places: of the architecture.
        params: nested dict of ShapeDtypeStructs with shardings; values are rounded to these dtypes.

    Raises:
        UserError: a file cannot be read, a tensor is missing, superfluous or of another shape, or a tied head differs
            from the embedding.
    """
    flat = {"/".join(path): leaf for path, leaf in _leaves(params)}
    found = parameter_slices(places, {path: leaf.shape for path, leaf in flat.items()})
    have = add_prefix(open_tensors(folder), places)
    check_tensors(folder, have, tensor_shapes(found), next(place.name for place in places if place.path == TABLE))
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = _placed(found[path], leaf, have)
    return tree


def add_prefix(have: dict[str, Entry], places: Sequence[TensorMapping]) -> dict[str, Entry]:
    """The tensors by the names that the class with a head gives them: saved without it, they lack its first word."""
    first = places[0].name.partition(".")[0] + "."
    if any(name.startswith(first) for name in have):
        return have
    return {name if name == HEAD else first + name: entry for name, entry in have.items()}


def check_tensors(folder: Path, have: dict[str, Entry], wanted: dict[str, tuple[int, ...]], tied: str) -> None:
    """Raises UserError, naming tensors, where the files do not hold what the model is made of.

    tied: name of the embedding, which a tied head must be.
    """
    missing = [name for name in wanted if name not in have]
    if missing:
        raise UserError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    for name, shape in wanted.items():
        have[name].check(name)
        if have[name].shape != shape:
            message = f"{name} is {list(have[name].shape)}; its config.json makes it {list(shape)}"
            raise UserError(f"{have[name].path}: {message}")
    other = [name for name in have if name not in wanted and not BUFFERS.fullmatch(name)]
    if HEAD in other and tied in have:
        if have[HEAD].shape != have[tied].shape or not _equal(have[HEAD].open(), have[tied].open()):
            message = f"{HEAD} is not {tied}, though config.json ties them; expected tie_word_embeddings false"
            raise UserError(f"{have[HEAD].path}: {message}")
        other.remove(HEAD)
    if other:
        raise UserError(f"{folder}: {len(other)} tensors that the model does not have: {_some(other)}")


def _placed(part: TensorSlice, leaf: Any, have: dict[str, Entry]) -> jax.Array:
    """One parameter in its sharding."""
    blocks: dict[tuple[tuple[int, int], ...], tuple[Index, list[Any]]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        index = tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, leaf.shape))
        blocks.setdefault(tuple((one.start, one.stop) for one in index), (index, []))[1].append(device)
    arrays = []
    for index, devices in blocks.values():
        arrays += _filled(part, index, leaf.dtype, have, devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def _filled(part: TensorSlice, index: Index, dtype: Any, have: dict[str, Entry], devices: list[Any]) -> list[jax.Array]:
    """A block of a parameter on each of these devices."""
    found = list(split_block(index, _cuts(part), PIECE // np.dtype(dtype).itemsize))
    if len(found) == 1:
        # No alias: a step that donates its state must own it.
        block = read_block(part, index, dtype, have)
        return jax.block_until_ready([jax.device_put(block, device, may_alias=False) for device in devices])
    arrays = [jnp.zeros([one.stop - one.start for one in index], dtype, device=device) for device in devices]
    for inner in found:
        block = read_block(part, inner, dtype, have)
        start = np.array([one.start - outer.start for one, outer in zip(inner, index)], np.int32)
        arrays = [jax.block_until_ready(_written(array, block, start)) for array in arrays]
    return arrays


@partial(jax.jit, donate_argnums=0)
def _written(array: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, block, list(start))


def split_block(index: Index, dims: Sequence[int], most: int) -> Iterator[Index]:
    """A block cut along these dims, the first ones first, until its pieces have at most `most` elements."""
    size = prod(one.stop - one.start for one in index)
    if size <= most or not dims:
        yield index
        return
    dim, *rest = dims
    start, stop = index[dim].start, index[dim].stop
    each = max(1, most * (stop - start) // size)
    for low in range(start, stop, each):
        inner = slice(low, min(low + each, stop))
        yield from split_block((*index[:dim], inner, *index[dim + 1 :]), rest, most)


def _cuts(part: TensorSlice) -> list[int]:
    """Dims of a parameter along which it is cut: those stacked from tensors, then as these lie in the file."""
    depth = len(part.stack)
    return [*range(depth), *(part.place.ours.index(group[0], depth) for group in part.place.dims.split())]


def read_block(part: TensorSlice, index: Index, dtype: Any, have: dict[str, Entry]) -> np.ndarray:
    """A block of a parameter, stacked from its tensors."""
    depth = len(part.stack)
    block = np.empty([one.stop - one.start for one in index], dtype)
    for at in np.ndindex(*block.shape[:depth]):
        name = part.named([one.start + i for one, i in zip(index, at)])
        found = part.take(have[name].open(), index[depth:])
        if found.dtype == block.dtype:  # copied as integers: NumPy moves bfloat16 one by one
            block.view(f"u{block.itemsize}")[at] = found.view(f"u{block.itemsize}")
        else:
            block[at] = found
    return block


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    rows = max(1, (1 << 24) // max(a.shape[-1], 1))
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, a.shape[0], rows))


def _leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        yield from _leaves(value, (*path, name)) if isinstance(value, dict) else [((*path, name), value)]


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
