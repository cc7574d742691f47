"""Safetensors files: slices of tensors are read by the safetensors package, files are written one tensor at a time.

The writer is ours because `safetensors.numpy.save_file` needs all tensors of a file in memory. The format
(https://github.com/huggingface/safetensors#format): 8 bytes with the length of a JSON header, the header (name ->
dtype, shape, first and last byte), the data.
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
from safetensors import SafetensorError, safe_open

from jaxtrain.errors import ModelFileError, format_name, format_value
from jaxtrain.interop.config_json import read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPE_NAMES = {
    np.dtype(np.float64): "F64", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. Indexing it with slices reads that part only."""

    path: Path
    view: Any  # `safe_open(path).get_slice(name)`

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.get_shape())

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.view[index]

    def check_dtype(self, name: str) -> None:
        """Raises ModelFileError if the tensor `name` does not hold floats."""
        dtype = self.view.get_dtype()
        if dtype not in DTYPE_NAMES.values():
            message = f"expected {', '.join(DTYPE_NAMES.values())} (quantised models are not supported)"
            raise ModelFileError(f"{self.path}: {name} is {format_value(dtype)}; {message}")


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Opens the tensors of all safetensors files of a model, by name.

    Raises:
        ModelFileError: no files, a missing or truncated file, or a tensor of the index that its file does not have.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            hint = "; pytorch_model.bin is not supported: save it as safetensors" if list(folder.glob("*.bin")) else ""
            raise ModelFileError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}{hint}")
        return open_file(folder / SINGLE_FILE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise ModelFileError(f"{index}: expected a weight_map of tensor names to files")
    for file in sorted(set(weight_map.values())):
        if not os.path.isfile(folder / file):  # False, too, for a name that no file can have
            raise ModelFileError(f"{folder / format_name(file)}: no such file, but {INDEX_FILE} lists it")
    files = {file: open_file(folder / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise ModelFileError(f"{folder / file}: has no {format_name(name)}, which {INDEX_FILE} lists there")
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Opens the tensors of one safetensors file, by name.

    Raises:
        ModelFileError: no such file, or a truncated one.
    """
    try:
        file = safe_open(path, "numpy")
        return {name: StoredTensor(path, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{path}: truncated, or not safetensors ({error})") from None


def assign_files(shapes: Shapes, dtype: np.dtype, max_bytes: int) -> dict[str, list[str]]:
    """Distributes tensors over files of at most `max_bytes`; a larger tensor gets a file alone.

    Returns:
        File name -> names of its tensors, in the order of `shapes`.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def write_file(path: Path, shapes: Shapes, dtype: np.dtype, values: Iterable[np.ndarray]) -> None:
    """Writes one file from `values` in the order of `shapes`, holding one of them at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            file.write(np.ascontiguousarray(value, dtype).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(folder: Path, shapes: Shapes, dtype: np.dtype, max_bytes: int, values: Iterator[np.ndarray]) -> int:
    """Writes the tensors of a model, with an index if they need several files.

    Args:
        folder: an existing folder.
        shapes: name -> shape of each tensor.
        dtype: dtype in the files; values are rounded to it.
        max_bytes: maximum bytes of a file.
        values: the tensors in the order of `shapes`.

    Returns:
        Bytes of all tensors.
    """
    files = assign_files(shapes, dtype, max_bytes)
    for file, names in files.items():
        write_file(folder / file, {name: shapes[name] for name in names}, dtype, (next(values) for _ in names))
    total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return total
