"""Keeps copies of the state in the memory of two nodes, between checkpoints."""

from __future__ import annotations

from jaxtrain.callbacks.base import Callback, StateSource, TrainerView
from jaxtrain.checkpoint.memory.checkpointer import Keeper
from jaxtrain.checkpoint.memory.client import nodes
from jaxtrain.core.program import State


class MemoryCheckpoint(Callback):
    """Copies the state to the memory of the nodes every few steps, and resumes from there.

    Does nothing unless the launcher offers the nodes' memory (`jaxtrain launch --memory`).
    """

    def __init__(self) -> None:
        self._memory: Keeper | None = None

    def setup(self, trainer: TrainerView) -> None:
        """Connects to the memory of the nodes."""
        where = nodes()
        if where is not None:
            self._memory = Keeper(where, lambda text: trainer.trackers.event("warning", text=text))

    def find_state(self, trainer: TrainerView, newer_than: int) -> StateSource | None:
        """Returns the newest complete state in memory that is later than `newer_than`."""
        memory = self._memory
        copy = None if memory is None else memory.newest(after=newer_than)
        if memory is None or copy is None:
            return None
        load = lambda abstract: memory.restore(copy, abstract)  # noqa: E731
        return StateSource(copy.step, copy.manifest, "the memory of the nodes", load)

    def on_step_dispatched(self, trainer: TrainerView, step: int) -> None:
        """Starts to replicate the last copy: its step is validated and logged, and its save has begun."""
        if self._memory is not None:
            self._memory.share()

    def after_save(self, trainer: TrainerView, state: State, step: int) -> None:
        """Copies the state if it is due. Skipped on the last step, which no resumed run needs, and in bad steps."""
        if self._memory is None or step >= trainer.config.steps:
            return
        if step % self._memory.every == 0 and trainer.callbacks.is_healthy():
            with trainer.ledger.phase("checkpoint"):
                self._memory.keep(step, state, trainer.manifest)

    def on_rewind(self, trainer: TrainerView, step: int) -> None:
        """Discards copies of later steps."""
        if self._memory is not None:
            self._memory.forget(step)
