"""Data from Python objects: anything with `batch(step, rows)`, arrays, data sets of rows, iterables of batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxtrain.data.dataset import Dataset
from jaxtrain.data.objects.iterables import IterableData
from jaxtrain.data.objects.rows import ArrayData, RowData
from jaxtrain.data.objects.shard import WHOLE, DataShard
from jaxtrain.errors import DataError

RowsOf = Literal["global", "local"]
EXPECTED = (
    "an object with `batch(step, rows)`, a {name: array} of rows, a data set of rows, or an iterable of batches or a "
    "function that returns one"
)


def as_dataset(
    source: Any, global_batch: int, seed: int = 0, name: str = "data", rows: RowsOf = "global",
    shard: DataShard = WHOLE,
) -> Any:  # fmt: skip
    """Returns the dataset of an object.

    Args:
        source: has `batch(step, rows)`; or is a {name: array} of all rows; or a `datasets.Dataset`, a torch `Dataset`
            or another object with a length and an index, of all rows; or an iterable of batches, or a function that
            returns one, whose batches are {name: array}.
        global_batch: rows of a step.
        seed: of the order of the rows of arrays and data sets.
        name: of the argument, for messages.
        rows: of the batches of an iterable: "global", the same on every process, or "local", those of the shard.
        shard: rows of this process.

    Raises:
        DataError: none of these.
    """
    found = _rows_by_step(source, global_batch, seed, name)
    if found is not None:
        return found
    if isinstance(source, IterableData):
        source.share(shard, rows == "local")
        return source
    if callable(source) or isinstance(source, Iterable):
        return IterableData(source, global_batch, name, shard, rows == "local")
    raise DataError(f"{name}: {type(source).__name__} is no data; expected {EXPECTED}")


def _rows_by_step(source: Any, global_batch: int, seed: int, name: str) -> Any | None:
    """Returns data whose rows are a function of (seed, step); None for iterables."""
    if isinstance(source, IterableData):
        return None
    if isinstance(source, Dataset) and not _makes_batches(source):
        return source
    if isinstance(source, Mapping):
        if source and all(hasattr(value, "column_names") for value in source.values()):
            message = f"found the splits {', '.join(map(str, source))} of a data set; expected one of them"
            raise DataError(f"{name}: {message}")
        return ArrayData(source, global_batch, seed, name)
    has_index = hasattr(source, "__len__") and hasattr(source, "__getitem__") and not callable(source)
    if has_index and (hasattr(source, "column_names") or not hasattr(source, "__iter__")):
        return RowData(source, global_batch, seed, name)
    return None


def _makes_batches(source: Any) -> bool:
    """Returns whether `batch` of an object is that of grain, datasets or tf.data, which groups rows to batches."""
    try:
        return "batch_size" in inspect.signature(source.batch).parameters
    except (TypeError, ValueError):
        return False
