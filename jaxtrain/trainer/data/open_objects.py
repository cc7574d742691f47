"""Opens the data that is given as Python objects, and compares it between processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from jaxtrain.config import Config
from jaxtrain.core.batch_spec import example_row
from jaxtrain.core.components import Components
from jaxtrain.core.placement import process_shard
from jaxtrain.data.objects.batch_arrays import digest, spec_digest
from jaxtrain.data.objects.iterables import IterableData
from jaxtrain.data.objects.open import as_dataset
from jaxtrain.distributed.multihost import first_message, gather_bytes
from jaxtrain.errors import DataError, UserError
from jaxtrain.trainer.data.batch_reader import SAME, JointEvaluationData, batch_error


def keep_place(components: Components, global_batch: int) -> Components:
    """Returns the components with an iterator, which can be read once, as data that knows how far it was read.

    A run that is opened again, as by a second `fit`, then goes on from there.
    """
    data = components.data
    if not isinstance(data, Iterator) or callable(data):
        return components
    return replace(components, data=IterableData(data, global_batch))


def open_objects(config: Config, components: Components) -> tuple[Any, dict[str, Any]]:
    """Opens the training data of a run of Python objects, and its validation data under `eval/`.

    Raises:
        UserError: there is none, bad data on any process, or first batches that differ between processes.
    """
    if components.data is None:
        raise UserError("data: the run has some that was given in Python; expected it again, as `data=...`")
    data = _open(config, components, "data")
    if components.rows == "local" and not isinstance(data, IterableData):
        message = (
            f'{type(components.data).__name__} is asked for the rows of each process, so it cannot be rows="local"'
        )
        raise DataError(f"data: {message}; expected an iterable of local batches")
    if isinstance(data, IterableData) and config.guard.spike.action == "rollback":
        data.check_can_go_back()
    return data, {} if components.eval_data is None else {"eval/": open_eval_data(config, components)}


def open_eval_data(config: Config, components: Components, once: bool = False) -> Any:
    """Opens the validation data that is given as an object.

    Args:
        config: of the run.
        components: objects of the run.
        once: it is for one validation alone.

    Raises:
        UserError: bad data, or an iterator for several validations.
    """
    data = _open(config, components, "eval_data")
    if not isinstance(data, IterableData):
        return data
    if config.eval.every is not None and not once and not data.is_reopenable:
        expected = "expected a function that returns it, or a list"
        raise DataError(f"eval_data: an iterator can be read once, and eval.every validates again; {expected}")
    return data if jax.process_count() == 1 else JointEvaluationData(data)


def _open(config: Config, components: Components, name: str) -> Any:
    """Opens `data` or `eval_data` and reads a row. What is wrong on one process is an error of all."""
    data, failure = None, None
    try:
        shard = process_shard(config, jax.devices())
        source, rows = getattr(components, name), config.data.global_batch
        data = as_dataset(source, rows, config.seed, name, components.rows, shard)
        example_row(config.data.model_copy(update={"type": "object"}), data)
    except Exception as error:
        failure = error
    text = first_message(None if failure is None else str(batch_error(0, failure)))
    if isinstance(failure, UserError):
        raise failure
    if text is not None:
        raise DataError(text) from failure
    if isinstance(data, IterableData):
        _compare(data)
    return data


def _compare(data: IterableData) -> None:
    """Raises DataError if the first batch differs between processes that hold the same rows, or in its form."""
    if jax.process_count() == 1:
        return
    first = data.first_batch()
    found = gather_bytes(spec_digest(first) + digest(first))
    others = [other for other, value in enumerate(found) if value[:16] != found[0][:16]]
    if others:
        message = f"the arrays of its first batch have other names, shapes or dtypes on processes 0 and {others[0]}"
        raise DataError(f"{data.name}: {message}; expected the same")
    groups = [range(len(found))]
    if data.is_local:
        groups = [[other for other in range(len(found)) if other in data.shard.peers]]
    pairs = [(group[0], other) for group in groups for other in group if found[other] != found[group[0]]]
    text = (
        f"{data.name}: its first batch differs between processes {pairs[0][0]} and {pairs[0][1]}; {SAME}"
        if pairs
        else None
    )
    if text := first_message(text):
        raise DataError(text)
