"""Checkpoints: asynchronous, sharded, atomic, checked byte for byte when they are read.

    with Checkpointer(run_dir / "checkpoints", keep=3, keep_best=1, best="eval/loss") as checkpoints:
        state, manifest = checkpoints.restore(None, abstract_state)
        checkpoints.save(step, state, manifest=manifest)    # returns after the device-to-host copy is dispatched
        for event in checkpoints.poll(): ...                # Committed, Retrying, SaveFailed, SetAside, Copied, ...

Only `checkpointer`, `reader`, `saving`, `together`, `notes`, `orbax`, `processes`, `snapshot` and `tree` import JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint.events import (
    Committed,
    Copied,
    CopyFailed,
    Event,
    Fetched,
    Retrying,
    SaveFailed,
    SetAside,
    SlowSave,
)
from jaxtrain.checkpoint.store import CheckpointStore, StepInfo, read_manifest
from jaxtrain.errors import CheckpointError

if TYPE_CHECKING:
    from jaxtrain.checkpoint.checkpointer import Checkpointer, Reader

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "Checkpointer",
    "Committed",
    "Copied",
    "CopyFailed",
    "Event",
    "Fetched",
    "Reader",
    "Retrying",
    "SaveFailed",
    "SetAside",
    "SlowSave",
    "StepInfo",
    "read_manifest",
]


def __getattr__(name: str) -> Any:
    """`Checkpointer` and `Reader` import JAX and orbax, so they are loaded on first use."""
    if name in ("Checkpointer", "Reader"):
        from jaxtrain.checkpoint import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
