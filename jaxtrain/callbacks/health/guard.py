"""Reacts to bad steps: skips them, rolls back to a checkpoint, or ends the run.

Decisions depend only on global metrics, so all processes agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.config.schema import SpikeConfig
from jaxtrain.core.program import State
from jaxtrain.errors import DivergedError
from jaxtrain.precision.loss_scaling import MIN_SCALE

PATIENCE = 20  # consecutive steps without an update that end a run
MAX_ROLLBACKS = 3  # to the same checkpoint
REPORTED = ("loss", "grad_norm", "spike")


class StepGuard(Callback):
    """Counts steps without an update, ends a diverged run, and rolls back before a spike.

    The batches around a spike are skipped from then on: their ranges are in the manifest of every checkpoint
    (`skips`), so that a resumed run skips the same.

    Args:
        spike: reaction to spikes of the loss or the gradient norm; with action none only non-finite steps count.
    """

    watched = (*REPORTED, "skipped", "loss_scale")

    def __init__(self, spike: SpikeConfig) -> None:
        self._config, self._patience = spike, PATIENCE
        self._in_row, self._rollbacks = 0, dict[int, int]()
        self._spike_step: int | None = None  # spike that a rollback is due for
        self.skipped = 0  # steps without an update since the start

    def on_train_begin(self, trainer: TrainerView, step: int) -> None:
        """Limits the consecutive bad steps that end the run to the number of steps left."""
        self._patience = max(1, min(PATIENCE, trainer.config.steps - step))

    def on_metrics(self, trainer: TrainerView, step: int, values: Mapping[str, float]) -> None:
        """Takes note of a finished step. Raises DivergedError after too many in a row without an update."""
        limit = self._config.threshold if self._config.action == "rollback" else math.inf
        if values.get("spike", 0.0) > limit and not self._spike_step:
            self._spike_step = step
            self._report(trainer, "spike", step, values)
        if not values["skipped"]:
            self._in_row = 0
            return
        self.skipped += 1
        if values.get("loss_scale", 0.0) > MIN_SCALE and math.isfinite(values["loss"]):
            return  # float16 overflow: the loss scale is lowered
        self._in_row += 1
        self._report(trainer, "skipped", step, values)
        if self._in_row >= self._patience:
            text = f"{self._in_row} steps in a row made no update; {_describe(values)} at step {step}"
            raise DivergedError(f"{text}; {trainer.last_good_checkpoint()}")

    def is_healthy(self) -> bool:
        """Returns False while a rollback is due or the last step made no update."""
        return self._spike_step is None and not self._in_row

    def allows_save(self, trainer: TrainerView, state: State, step: int, is_last: bool) -> bool:
        """Refuses while a rollback is due and, unless the run ends here, while steps make no update.

        The state itself is always that of the last good update.
        """
        return self._spike_step is None and (is_last or not self._in_row)

    def rewind(self, trainer: TrainerView, state: State, step: int) -> tuple[State, int] | None:
        """Restores a checkpoint from before the spike, and skips the batches around the spike from now on.

        The checkpoint is the newest one `rollback_steps` before, else the oldest. Without any, training goes forward.

        Raises:
            DivergedError: too many rollbacks to the same checkpoint.
        """
        spike, self._spike_step = self._spike_step, None
        if spike is None:
            return None
        with trainer.ledger.phase("restore"):
            target = trainer.checkpoint_before(spike, self._config.rollback_steps)
        if target is None:
            trainer.trackers.event(
                "warning", text=f"no checkpoint before the spike at step {spike}: training continues"
            )
            return None
        self._rollbacks[target] = self._rollbacks.get(target, 0) + 1
        if self._rollbacks[target] > MAX_ROLLBACKS:
            text = f"spikes again at step {spike}, after {MAX_ROLLBACKS} rollbacks to checkpoint {target}"
            raise DivergedError(f"{text}; that is the last good one")
        skipped = self._batches_around(trainer.batch_of(spike - 1), trainer.batch_of(target))
        state, step = trainer.return_to(state, target, skipped)
        batches = f"{skipped[0]} to {skipped[1] - 1} skipped"
        trainer.trackers.event("rollback", step=step, spike=spike, batches=batches)
        return state, step

    def _batches_around(self, spike: int, first: int) -> tuple[int, int]:
        """Range of batches to skip: centred on the spike's batch, not before the first one after the checkpoint."""
        count = self._config.skip_batches
        return max(spike - count // 2, first), spike + count - count // 2

    def _report(self, trainer: TrainerView, kind: str, step: int, values: Mapping[str, float]) -> None:
        trainer.trackers.event(kind, step=step, **{name: values[name] for name in REPORTED if name in values})


def _describe(values: Mapping[str, float]) -> str:
    z = f", z-score {values['spike']:.3g}" if math.isfinite(values.get("spike", math.nan)) else ""
    return f"loss {values['loss']}, gradient norm {values['grad_norm']}{z}"
