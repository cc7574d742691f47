"""Watch over the run's folder: a run whose folder is moved or deleted ends, because it could not save any more."""

from __future__ import annotations

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.errors import CheckpointError

CONFIRMATIONS = 3  # equal answers, a second apart, of a file system that may be wrong for a moment


class RunFolderWatch(Callback):
    """Ends the run, in one line, when its folder is moved, deleted, or written by another run."""

    def __init__(self) -> None:
        self._problem, self._count = "", 0

    def on_train_begin(self, trainer: TrainerView, step: int) -> None:
        """Begins to look at the folder once a second."""

        def look() -> None:
            problem = trainer.checkpointer.folder_problem() or ""
            self._count = self._count + 1 if problem and problem == self._problem else bool(problem)
            self._problem = problem

        trainer.ticker.add(look)

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Raises CheckpointError if the folder is not this run's any more."""
        if self._count >= CONFIRMATIONS:
            self._end(trainer, self._problem, step)

    def on_train_end(self, trainer: TrainerView) -> None:
        """Looks once more, because the last checkpoint must not go astray."""
        if problem := trainer.checkpointer.folder_problem():
            self._end(trainer, problem, trainer.ledger.step)

    def _end(self, trainer: TrainerView, problem: str, step: int) -> None:
        trainer.checkpointer.give_up()
        raise CheckpointError(f"{problem}; the run ends after step {step}, because it could save no more")
