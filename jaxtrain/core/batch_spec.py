"""Shapes and dtypes of a batch, from a row of the data or from the config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import DataConfig
from jaxtrain.errors import UserError

TOKENS = {"tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "segments": jnp.int32}


def example_row(data: DataConfig, dataset: Any) -> Mapping[str, Any] | None:
    """Returns a row of a user's own dataset, whose shapes no config tells; None for text."""
    if data.is_text:
        return None
    first_row = getattr(dataset, "first_row", None)  # of an iterable, which may be far beyond its batch 0
    return dataset.batch(0, slice(0, 1)) if first_row is None else first_row()


def batch_spec(
    data: DataConfig, rows: int, example: Mapping[str, Any] | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a batch of `rows`.

    Args:
        data: the `data` section.
        rows: of the batch.
        example: a batch of the dataset, of any number of rows; default: packed tokens of the config's length.

    Raises:
        UserError: a user's own dataset without an example.
    """
    if example is not None:
        return {k: jax.ShapeDtypeStruct((rows, *value.shape[1:]), value.dtype) for k, value in example.items()}
    if not data.is_text:
        raise UserError(f"data.type {data.type}: expected an example batch to compile the step of a user's dataset")
    dtypes = TOKENS | {"weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct((rows, data.sequence), dtype) for name, dtype in dtypes.items()}
