"""Checkpoints: asynchronous, sharded, atomic, checked byte for byte when they are read.

    with Checkpointer(run_dir / "checkpoints", keep=3, keep_best=1, best="eval/loss") as checkpoints:
        state, manifest = checkpoints.restore(None, abstract_state)
        checkpoints.save(step, state, manifest=manifest)    # returns after the device-to-host copy is dispatched
        for event in checkpoints.poll(): ...                # Committed, Retrying, Failed, SetAside, Copied, ...

Only `checkpointer`, `reader`, `saving`, `together`, `notes`, `orbax`, `processes`, `snapshot` and `tree` import JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint.events import Committed, Copied, Event, Failed, Fetched, NotCopied, Retrying, SetAside, Slow
from jaxtrain.checkpoint.files import CheckpointError
from jaxtrain.checkpoint.promise import compare_configs, environment, promise
from jaxtrain.checkpoint.signals import EXIT_SAVED, Signals
from jaxtrain.checkpoint.store import StepInfo, Store, read_manifest

if TYPE_CHECKING:
    from jaxtrain.checkpoint.checkpointer import Checkpointer, Reader

__all__ = [
    "EXIT_SAVED",
    "CheckpointError",
    "Checkpointer",
    "Committed",
    "Copied",
    "Event",
    "Failed",
    "Fetched",
    "NotCopied",
    "Reader",
    "Retrying",
    "SetAside",
    "Signals",
    "Slow",
    "StepInfo",
    "Store",
    "compare_configs",
    "environment",
    "promise",
    "read_manifest",
]


def __getattr__(name: str) -> Any:
    """`Checkpointer` and `Reader` import JAX and orbax, so they are loaded on first use."""
    if name in ("Checkpointer", "Reader"):
        from jaxtrain.checkpoint import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
