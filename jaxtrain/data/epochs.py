"""Steps of a run that is as long as some epochs of its data."""

from __future__ import annotations

from typing import Any

from jaxtrain.config.checks import round_problems, schedule_problems
from jaxtrain.config.field_types import LARGEST
from jaxtrain.config.schema import Config
from jaxtrain.data.objects.iterables import IterableData
from jaxtrain.errors import ConfigError, DataError, Problem


def with_steps(config: Config, data: Any) -> Config:
    """Returns the config with the steps of its epochs; unchanged without `epochs`.

    An iterable then begins again at its end.

    Raises:
        DataError: the length of the data is not known, or an iterable of several epochs can be read once.
        ConfigError: the schedule, or the rounds between exchanges, do not fit the steps.
    """
    if config.epochs is None:
        return config
    if isinstance(data, IterableData):
        if config.epochs > 1 and not data.is_reopenable:
            data.check_can_go_back()
            raise DataError(f"epochs: {data.name} is an iterator, which is read once; expected what it is made of")
        data.is_repeated = True
    config = config.model_copy(update={"steps": _steps(data, config.epochs, config.data.global_batch)})
    found = [*schedule_problems(config), *round_problems(config)]
    if problems := [Problem("", ".".join(one.keys[:1]), one.message) for one in found]:
        raise ConfigError(problems)
    return config


def _steps(data: Any, epochs: int, global_batch: int) -> int:
    rows, batches = getattr(data, "epoch_rows", None), getattr(data, "batches", None)
    if batches is None and hasattr(type(data), "__len__"):
        batches = len(data)
    if rows is not None:
        steps = -(-epochs * rows // global_batch)
    elif batches is not None:
        steps = epochs * batches
    else:
        kind = "a mixture of sources, which have epochs of their own" if hasattr(data, "epoch_rows") else "data without"
        known = "" if hasattr(data, "epoch_rows") else " a length (`batches` or `len`)"
        raise DataError(f"epochs: this is {kind}{known}; expected steps")
    if not 1 <= steps <= LARGEST:
        raise DataError(f"epochs: {epochs} epochs of this data are {steps:,} steps; expected steps")
    return steps
