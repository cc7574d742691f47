"""Safetensors files, read by the slice and written tensor by tensor.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the length of a JSON header, the header
(name -> dtype, shape, first and last byte), the bytes. It is read and written here rather than by the safetensors
package, which wants all tensors of a file in memory to write it, and whose NumPy side has not always known bfloat16.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import ModelFileError, format_value
from jaxtrain.interop.config_json import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER = 100_000_000  # bytes, as the reference implementation allows


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype by the name it has there, and where its bytes begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def check(self, name: str) -> None:
        """Raises ModelFileError for a tensor of this name that holds no floats."""
        if self.dtype not in DTYPES:
            message = f"expected {', '.join(DTYPES)} (quantised models are not read)"
            raise ModelFileError(f"{self.path}: {name} is {format_value(self.dtype)}; {message}")

    def open(self) -> np.ndarray:
        """The tensor, memory-mapped: slicing reads what it touches."""
        if prod(self.shape) == 0:
            return np.empty(self.shape, DTYPES[self.dtype])
        return np.memmap(self.path, DTYPES[self.dtype], "r", self.offset, self.shape)


def open_tensors(folder: Path) -> dict[str, Entry]:
    """name -> tensor of all safetensors files of a model.

    Raises:
        ModelFileError: there are none, one is missing or truncated, or the index names a tensor that its file does not
        have.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            hint = "; pytorch_model.bin is not read: save it as safetensors" if list(folder.glob("*.bin")) else ""
            raise ModelFileError(f"{folder}: no {SINGLE} and no {INDEX}{hint}")
        return _header(folder / SINGLE)
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in where.values()
    ):
        raise ModelFileError(f"{index}: expected a weight_map of tensor names to files")
    found = {file: _header(folder / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in found[file]:
            raise ModelFileError(f"{folder / file}: has no {name}, which {INDEX} says it has")
    return {name: entry for entries in found.values() for name, entry in entries.items()}


def _header(path: Path) -> dict[str, Entry]:
    """The tensors of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MOST_HEADER, size - 8):
                raise ModelFileError(f"{path}: truncated, or not safetensors: {size} bytes, header of {length}")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file, but {INDEX} names it") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: not safetensors ({error})") from None
    entries, last = {}, 0
    try:
        for name, value in header.items():
            if name != "__metadata__":
                entries[name], end = _entry(path, name, value, 8 + length)
                last = max(last, end)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: not safetensors (its header is malformed: {error!r})") from None
    if 8 + length + last != size:
        raise ModelFileError(f"{path}: truncated or damaged: {size} bytes; its header says {8 + length + last}")
    return entries


def _entry(path: Path, name: str, value: dict[str, Any], base: int) -> tuple[Entry, int]:
    """One tensor, and where its bytes end."""
    dtype, shape, (begin, end) = value["dtype"], tuple(map(int, value["shape"])), value["data_offsets"]
    size = prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else end - begin
    if begin < 0 or end - begin != size or end < begin:
        raise ModelFileError(
            f"{path}: {name} has {end - begin} bytes, which its shape {list(shape)} of {dtype} does not"
        )
    return Entry(path, dtype, shape, base + begin), end


def assign_files(shapes: dict[str, tuple[int, ...]], dtype: np.dtype, most: int) -> dict[str, list[str]]:
    """File name -> names of its tensors, in order; no file has more than `most` bytes, but one tensor it has."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def write_file(path: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype, values: Iterable[np.ndarray]) -> None:
    """Writes one file; `values` come in the order of `shapes`, one in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            file.write(np.ascontiguousarray(value, dtype).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(
    folder: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype, most: int, values: Iterator[np.ndarray]
) -> int:
    """Writes all tensors, and the index where there are several files. Returns the bytes of the tensors."""
    files = assign_files(shapes, dtype, most)
    for name, names in files.items():
        write_file(folder / name, {tensor: shapes[tensor] for tensor in names}, dtype, (next(values) for _ in names))
    total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
    if len(files) > 1:
        where = {tensor: name for name, names in files.items() for tensor in names}
        content = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return total
