"""Values of device arrays on their way: each shard is a piece, so that no tensor is whole on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.islands.blocks import EncodedArray, EncodedBlock
from jaxtrain.islands.partition import Part, Parts, Spec
from jaxtrain.islands.trees import Flat, Path


class TensorPiece(NamedTuple):
    """A block of a tensor.

    Attributes:
        start: its first index in each dim.
        values: the block, or that in few bits.
    """

    start: tuple[int, ...]
    values: np.ndarray | EncodedBlock


Pieces = Mapping[Path, Sequence[TensorPiece]]


def pieces_of(arrays: Mapping[Path, jax.Array | EncodedArray], parts: Parts) -> dict[Path, list[TensorPiece]]:
    """Returns what one server gets of device arrays: the shards of this process that meet its parts, each once."""
    return {path: _of_any(arrays[path], part) for path, part in parts.items()}


def merged(pieces: Sequence[Pieces]) -> dict[Path, list[TensorPiece]]:
    """Returns the pieces of all processes of an island."""
    paths = dict.fromkeys(path for each in pieces for path in each)
    return {path: [piece for each in pieces for piece in each.get(path, ())] for path in paths}


def whole_pieces(values: Mapping[Path, np.ndarray | EncodedBlock]) -> dict[Path, list[TensorPiece]]:
    """Returns values as pieces, one for each tensor."""

    def dims(x: np.ndarray | EncodedBlock) -> int:
        return x.message.ndim if isinstance(x, EncodedBlock) else x.ndim

    return {path: [TensorPiece((0,) * dims(x), x)] for path, x in values.items()}


def piece_bytes(pieces: Pieces) -> int:
    """Returns the bytes that travel."""
    return sum(piece.values.nbytes for found in pieces.values() for piece in found)


def decoded(pieces: Pieces) -> dict[Path, list[TensorPiece]]:
    """Returns pieces of values: those that have travelled in few bits are float32."""

    def one(piece: TensorPiece) -> TensorPiece:
        return TensorPiece(piece.start, piece.values.decode()) if isinstance(piece.values, EncodedBlock) else piece

    return {path: [one(piece) for piece in found] for path, found in pieces.items()}


def _of_any(array: jax.Array | EncodedArray, part: Part) -> list[TensorPiece]:
    """Returns the pieces of an array; those of a message begin where its values do."""
    if not isinstance(array, EncodedArray):
        return _pieces(array, part)
    width = array.message.sharding.shard_shape(array.message.shape)[-1]
    return [
        TensorPiece((*start[:-1], start[-1] // width * array.size), EncodedBlock(message, array.size, array.bits))
        for start, message in _pieces(array.message, part)
    ]


def _pieces(array: jax.Array, part: Part) -> list[Any]:
    found: list[TensorPiece] = []
    for shard in array.addressable_shards:
        if shard.replica_id != 0:
            continue
        start = tuple(index.indices(size)[0] for index, size in zip(shard.index, array.shape))
        if part.start is None or part.stop is None:
            found.append(TensorPiece(start, np.asarray(shard.data)))
            continue
        first, stop = max(start[0], part.start), min(start[0] + shard.data.shape[0], part.stop)
        if first < stop:
            values = np.asarray(shard.data)[first - start[0] : stop - start[0]]
            found.append(TensorPiece((first - part.start, *start[1:]), values))
    return found


def assemble(pieces: Mapping[Path, Sequence[Any]], specs: Mapping[Path, Spec]) -> Flat:
    """Returns the tensors, or parts of them, that pieces make up; one that is whole is not copied.

    Raises:
        ValueError: a tensor is missing, of another shape, or has holes.
    """
    return {path: _assemble(path, pieces.get(path, ()), spec) for path, spec in specs.items()}


def _assemble(path: Path, pieces: Sequence[Any], spec: Spec) -> np.ndarray:
    if len(pieces) == 1 and pieces[0].values.shape == spec.shape:
        return pieces[0].values
    whole, filled = np.empty(spec.shape, pieces[0].values.dtype if pieces else spec.dtype), 0
    for start, values in pieces:
        block = tuple(slice(first, first + size) for first, size in zip(start, values.shape))
        if values.ndim != whole.ndim or whole[block].shape != values.shape:
            raise ValueError(f"{path}: a piece {values.shape} at {start}; expected one of {spec.shape}")
        whole[block] = values
        filled += values.size
    if filled != whole.size:
        raise ValueError(f"{path}: pieces of {filled} values; expected {whole.size}")
    return whole


def place(parts: Sequence[tuple[Part, np.ndarray]], like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a device array of the values of servers; each device gets its shard alone.

    Args:
        parts: what each server holds of the tensor, in the order of its layers.
        like: shape, dtype and sharding of the array.
    """
    whole = parts[0][0].start is None

    def shard(index: Any) -> np.ndarray:
        if whole or not index:
            return np.asarray(parts[0][1][index], like.dtype)
        first, stop, _ = index[0].indices(like.shape[0])
        blocks = [
            values[(slice(max(first - part.start, 0), max(stop - part.start, 0)), *index[1:])]
            for part, values in parts if part.start is not None and part.start < stop and first < (part.stop or 0)
        ]  # fmt: skip
        block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return np.asarray(block, like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, shard)


def place_rows(part: Part, values: np.ndarray, like: Any) -> jax.Array:
    """Returns a device array that has the values in the rows of a part, and zeros in the others.

    Args:
        part: some rows.
        values: of these.
        like: shape, dtype and sharding of the array.
    """

    def shard(index: Any) -> np.ndarray:
        found = np.zeros(like.sharding.shard_shape(like.shape), like.dtype)
        (start, stop, _), rows = index[0].indices(like.shape[0]), part.layers
        first, last = max(start, rows.start), min(stop, rows.stop)
        if first < last:
            found[first - start : last - start] = values[(slice(first - rows.start, last - rows.start), *index[1:])]
        return found

    return jax.make_array_from_callback(like.shape, like.sharding, shard)


def place_tree(given: Sequence[tuple[Parts, Mapping[Path, np.ndarray]]], like: Mapping[Path, Any]) -> Flat:
    """Returns device arrays of what servers gave: (what each holds, its values) of every server."""
    placed: Flat = {}
    for path, leaf in like.items():
        found: list[Any] = [(parts[path], values[path]) for parts, values in given if path in parts]
        placed[path] = place(sorted(found, key=lambda each: each[0].start or 0), leaf)
    return placed
