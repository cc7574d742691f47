"""Arrays of a batch, from what an iterable or a data set of rows returns."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from jaxtrain.errors import DataError

EXPECTED = "expected a dict of arrays, such as {'x': ..., 'y': ...}"
Spec = dict[str, tuple[tuple[int, ...], np.dtype]]


def to_arrays(found: Any, place: str, copy: bool = False) -> dict[str, np.ndarray]:
    """Returns a dict of NumPy arrays, also of tensors or lists of numbers.

    Args:
        found: the batch or row.
        place: what it is, for messages, such as `data: batch 3`.
        copy: True: the arrays share no memory with what was found, which may be filled again.

    Raises:
        DataError: it is no dict, or holds something else than numbers.
    """
    if not isinstance(found, Mapping):
        raise DataError(f"{place} is {type(found).__name__}; {EXPECTED}")
    return {str(key): _to_array(value, f"{place}: `{key}`", copy) for key, value in found.items()}


def _to_array(value: Any, place: str, copy: bool) -> np.ndarray:
    if isinstance(value, Mapping):
        raise DataError(f"{place} is {type(value).__name__}; expected an array, so all arrays in one dict")
    try:
        array = np.asarray(value)
    except Exception as error:  # lists of several lengths; tensors of a device, or with a dtype that NumPy lacks
        raise DataError(f"{place} cannot become an array: {one_line(error)}") from error
    if array.dtype.kind in "USOTMm":
        kind = "text" if array.dtype.kind in "UST" else f"of {array.dtype}" if array.dtype.kind in "Mm" else "ragged"
        if array.dtype.kind == "O" and array.size and isinstance(array.flat[0], str):
            kind = "text"
        raise DataError(f"{place} is {kind}; expected numbers in arrays of one shape, or to leave it out")
    is_shared = array is value or not array.flags.owndata or not array.flags.writeable
    return array.copy() if copy and is_shared else array


def spec_of(batch: Mapping[str, np.ndarray]) -> Spec:
    """Returns shapes and dtypes."""
    return {key: (value.shape, value.dtype) for key, value in batch.items()}


def check_rows(batch: Mapping[str, np.ndarray], rows: int, place: str, reason: str) -> None:
    """Raises DataError if an array has another number of rows; `reason` says where that number is from."""
    for key, value in batch.items():
        if value.shape[:1] != (rows,):
            raise DataError(f"{place.replace(': ', f': `{key}` of ', 1)} has the shape {value.shape}; expected {rows} "
                            f"rows ({reason})")  # fmt: skip


def check_same_spec(spec: Spec, before: Spec, place: str) -> None:
    """Raises DataError, which names an array, if a batch differs from those before in keys, shapes or dtypes."""
    names = sorted(key for key in spec.keys() | before.keys() if spec.get(key) != before.get(key))
    if names:
        old, new = (_describe(one.get(names[0])) for one in (before, spec))
        message = f"{place.replace(': ', f': `{names[0]}` of ', 1)} is {new}, and it was {old} before"
        raise DataError(f"{message}; expected one shape and dtype")


def _describe(spec: tuple[Any, ...] | None) -> str:
    return "absent" if spec is None else f"{spec[1]}{list(spec[0])}"


def digest(batch: Mapping[str, np.ndarray]) -> bytes:
    """Returns 16 bytes that tell batches of other keys, shapes, dtypes or values apart."""
    found = xxhash.xxh3_128()
    for key, value in sorted(batch.items()):
        found.update(f"{key} {value.shape} {value.dtype}".encode())
        found.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
    return found.digest()


def spec_digest(batch: Mapping[str, np.ndarray]) -> bytes:
    """Returns 16 bytes that tell batches of other keys, shapes or dtypes apart."""
    return xxhash.xxh3_128(repr(sorted((k, s, str(d)) for k, (s, d) in spec_of(batch).items())).encode()).digest()


def one_line(error: BaseException) -> str:
    """Describes an error of a user's code in one line, with the place where it was raised."""
    text = " ".join(str(error).split())[:200]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/jaxtrain/data/objects/" not in frame.filename.replace("\\", "/")]
    where = f" ({own[-1].filename.rpartition('/')[2]}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}".rstrip(": ") + where
