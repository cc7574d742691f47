"""Place of a run in data that is an iterable: saved beside the state, and found again on resume.

`manifest["data_place"]` says which rows the batches had, over how many shards, and which process wrote the state of
each shard's iterator, as data/process_N.json in the checkpoint. With global batches that of process 0 serves all.
"""

from __future__ import annotations

import json
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.files import DATA_FILE
from jaxtrain.data.objects.iterables import IterableData
from jaxtrain.data.skipped_batches import BatchRanges, batch_index
from jaxtrain.distributed.multihost import first_message
from jaxtrain.errors import CheckpointError, DataError
from jaxtrain.trackers.base import TrackerList

SAVED, READ = "resumed from its saved state", "resumed by reading over {:,} batches"


def described(data: Any) -> dict[str, Any]:
    """Returns the part of the manifest that describes an iterable; empty for other data."""
    if not isinstance(data, IterableData):
        return {}
    rows, writers = ("local", data.shard.leaders) if data.is_local else ("global", (0,))
    return {"data_place": {"rows": rows, "shards": data.shard.count, "writers": list(writers)}}


def data_files(data: Any, step: int, skips: BatchRanges, trackers: TrackerList) -> dict[str, str]:
    """Returns {name: text} of the files that this process adds to the checkpoint after `step` steps."""
    if not isinstance(data, IterableData) or not step:
        return {}
    process, had_problem = jax.process_index(), data.state_problem is not None
    writers = data.shard.leaders if data.is_local else (0,)
    place = data.state_after(batch_index(step - 1, skips)) if process in writers else None
    if data.state_problem and not had_problem:
        trackers.event("warning", text=f"{data.name}: {data.state_problem}, so a resumed run reads over its batches")
    return {} if place is None else {DATA_FILE.format(process): json.dumps(place)}


def restore_data(
    data: Any, checkpointer: Checkpointer | None, step: int, saved: dict[str, Any], skips: BatchRanges
) -> str | None:
    """Brings an iterable to the place after `step` steps, on all processes. Returns how, for the log.

    Args:
        data: the data; nothing is done if it is a function of (seed, step).
        checkpointer: has the checkpoint of the step; None: its state is from elsewhere.
        step: finished steps.
        saved: the manifest of the checkpoint.
        skips: ranges of skipped batches.

    Raises:
        DataError: the data ends before, does not take its state, or has local rows of another number of shards.
    """
    if not isinstance(data, IterableData) or not step:
        return None
    place, problem, text = saved.get("data_place"), None, None
    try:
        if place is not None and (problem := _change(data, place)) is None and checkpointer is not None:
            text = _read_state(data, checkpointer, step, place)
    except CheckpointError as error:
        problem = str(error)
    index = batch_index(step - 1, skips)
    is_saved = first_message("none" if text is None else None) is None
    try:
        if problem is None and is_saved and text is not None:
            data.restore_state(json.loads(text))
        elif problem is None:
            data.batch(index)
    except DataError as error:
        problem = str(error)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{data.name}: its saved state is not readable ({error})"
    if problem := first_message(problem):
        raise DataError(problem)
    return SAVED if is_saved else READ.format(index + 1)


def check_can_go_back(data: Any) -> None:
    """Raises DataError if data cannot be read again from an earlier step on."""
    if isinstance(data, IterableData):
        data.check_can_go_back()


def _change(data: IterableData, place: dict[str, Any]) -> str | None:
    """Describes why the data cannot be continued on other shards, or returns None."""
    now = "local" if data.is_local else "global"
    if place["rows"] != now:
        expected = f'expected rows="{place["rows"]}"'
        return f"{data.name}: its batches had {place['rows']} rows, and have {now} ones now; {expected}"
    if data.is_local and place["shards"] != data.shard.count:
        message = f"{place['shards']} shards had local rows, and {data.shard.count} have them now"
        return f"{data.name}: {message}; expected a layout and processes with {place['shards']}, or global batches"
    return None


def _read_state(data: IterableData, checkpointer: Checkpointer, step: int, place: dict[str, Any]) -> str | None:
    if not data.keeps_state:
        return None
    writer = place["writers"][data.shard.index if data.is_local else 0]
    return checkpointer.read_file(step, DATA_FILE.format(writer))
