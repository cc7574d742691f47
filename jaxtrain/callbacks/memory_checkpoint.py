"""Keeps copies of the state in the memory of two nodes, between checkpoints."""

from __future__ import annotations

from functools import partial

from jaxtrain.callbacks.base import Callback, StateSource, TrainerView
from jaxtrain.checkpoint.memory.checkpointer import MemoryCheckpointer
from jaxtrain.checkpoint.memory.client import peer_config
from jaxtrain.core.program import State


class MemoryCheckpoint(Callback):
    """Copies the state to the memory of two nodes every few steps, and resumes from there.

    Does nothing unless the launcher offers the nodes' memory (`jaxtrain launch --memory`).
    """

    def __init__(self) -> None:
        self._memory: MemoryCheckpointer | None = None

    def setup(self, trainer: TrainerView) -> None:
        """Connects to the memory of the nodes."""
        config = peer_config()
        if config is not None:
            self._memory = MemoryCheckpointer(config, lambda text: trainer.trackers.event("warning", text=text))

    def find_state(self, trainer: TrainerView, newer_than: int) -> StateSource | None:
        """Returns the newest complete state in memory that is later than `newer_than`."""
        memory = self._memory
        source = None if memory is None else memory.newest(after=newer_than)
        if memory is None or source is None:
            return None
        return StateSource(source.step, source.manifest, "the memory of the nodes", partial(memory.restore, source))

    def on_step_dispatched(self, trainer: TrainerView, step: int) -> None:
        """Starts to replicate the last snapshot: its step is validated and logged, and its save has begun."""
        if self._memory is not None:
            self._memory.replicate()

    def after_save(self, trainer: TrainerView, state: State, step: int) -> None:
        """Takes a snapshot if it is due; not of the last step, which no resumed run needs, nor while steps are bad."""
        if self._memory is None or step >= trainer.config.steps:
            return
        if step % self._memory.every == 0 and trainer.callbacks.is_healthy():
            with trainer.ledger.phase("checkpoint"):
                self._memory.snapshot(step, state, trainer.manifest)

    def on_rewind(self, trainer: TrainerView, step: int) -> None:
        """Discards snapshots of later steps."""
        if self._memory is not None:
            self._memory.discard_after(step)
