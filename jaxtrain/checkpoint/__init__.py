"""Checkpoints: asynchronous, sharded, atomic, with every byte checked on restore.

    with Checkpointer(run_dir / "checkpoints", keep=3, keep_best=1, best="eval/loss") as checkpoints:
        state, manifest = checkpoints.restore(None, abstract_state)
        checkpoints.save(step, state, manifest=manifest)    # returns after the device-to-host copy is dispatched
        for event in checkpoints.poll(): ...                # Committed, Retrying, SaveFailed, SetAside, Copied, ...

The modules `events`, `files`, `store`, `durable` and `durable_copy` import no JAX.
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
    from jaxtrain.checkpoint.checkpointer import Checkpointer
    from jaxtrain.checkpoint.reader import CheckpointReader

__all__ = [
    "CheckpointError", "CheckpointReader", "CheckpointStore", "Checkpointer", "Committed", "Copied", "CopyFailed",
    "Event", "Fetched", "Retrying", "SaveFailed", "SetAside", "SlowSave", "StepInfo", "read_manifest",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports `Checkpointer` and `CheckpointReader` on first use, because they import JAX and orbax."""
    if name in ("Checkpointer", "CheckpointReader"):
        from jaxtrain.checkpoint import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
