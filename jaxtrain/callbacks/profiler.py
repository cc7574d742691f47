"""Records an XProf trace of some steps of a run."""

from __future__ import annotations

import jax

from jaxtrain.callbacks.base import Callback, TrainerView


class Profiler(Callback):
    """Traces the steps [start, stop) into RUN_DIR/profile. Starting and writing the trace does not count as step time.

    Args:
        span: (start, stop) of the steps.
    """

    def __init__(self, span: tuple[int, int]) -> None:
        self._start, self._stop = span
        self._is_on = self._is_done = False

    def on_step_begin(self, trainer: TrainerView, step: int) -> None:
        """Starts or ends the trace."""
        if self._is_on and step >= self._stop:
            self.on_train_end(trainer)
        if not self._is_on and not self._is_done and self._start <= step < self._stop:
            with trainer.ledger.phase("eval"):
                jax.profiler.start_trace(str(trainer.dir / "profile"))
            self._is_on = True

    def on_train_end(self, trainer: TrainerView) -> None:
        """Ends an active trace and passes it to the trackers."""
        if not self._is_on:
            return
        with trainer.ledger.phase("eval"):
            jax.profiler.stop_trace()
        self._is_on, self._is_done = False, True
        trainer.trackers.artifact(trainer.dir / "profile")
