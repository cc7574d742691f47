"""Time accounting of a process in the events of its run."""

from __future__ import annotations

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.trackers.goodput import LedgerWriter


class GoodputRecorder(Callback):
    """Writes the ledger every few seconds while training runs, and at the end."""

    def __init__(self) -> None:
        self._writer: LedgerWriter | None = None

    def on_train_begin(self, trainer: TrainerView, step: int) -> None:
        """Starts the writer."""
        self._writer = LedgerWriter(trainer.ledger, trainer.trackers.record)
        trainer.ticker.add(self._writer)

    def close(self, trainer: TrainerView) -> None:
        """Writes the last record."""
        if self._writer is not None:
            self._writer.write()
