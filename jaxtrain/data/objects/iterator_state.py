"""States of iterators: which objects have one, and their form in a checkpoint, of JSON values alone."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # grain's; torchdata's and datasets'
PLAIN = (str, int, float, bool, type(None))


def state_methods(iterable: Any, iterator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any], bool] | None:
    """Returns the functions that read and set the state of an iterator.

    Args:
        iterable: what was iterated.
        iterator: of it.

    Returns:
        (read, set, True if the state belongs to the iterable and is set before it is iterated); None without a state.
    """
    for owner, is_iterable in ((iterator, iterator is iterable), (iterable, True)):
        for read, put in METHODS:
            if callable(getattr(owner, read, None)) and callable(getattr(owner, put, None)):
                return getattr(owner, read), getattr(owner, put), is_iterable
    return None


def encode(value: Any) -> Any:
    """Returns a state as JSON values.

    Raises:
        TypeError: it has a value of another kind than numbers, texts, bytes, arrays, tensors, lists, tuples and dicts.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, bytes):
        return {"kind": "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"kind": "tuple", "value": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"kind": "dict", "value": [[encode(key), encode(item)] for key, item in value.items()]}
    is_tensor = type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy")
    if is_tensor or isinstance(value, np.ndarray):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"an array of {array.dtype}")
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        kind = "tensor" if is_tensor else "array"
        return {"kind": kind, "value": data, "dtype": array.dtype.str, "shape": list(array.shape)}
    raise TypeError(type(value).__name__)


def decode(value: Any) -> Any:
    """Returns the state that `encode` was given.

    Raises:
        ValueError: it is not of this form.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        kind, content = value["kind"], value["value"]
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "tuple":
            return tuple(decode(item) for item in content)
        if kind == "dict":
            return {decode(key): decode(item) for key, item in content}
        if kind in ("array", "tensor"):
            flat = np.frombuffer(base64.b64decode(content), np.dtype(value["dtype"]))
            array = flat.reshape(value["shape"]).copy()
            return array if kind == "array" else importlib.import_module("torch").from_numpy(array)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the state of an iterator: {error}") from error
    raise ValueError(f"not the state of an iterator: kind {kind!r}")
