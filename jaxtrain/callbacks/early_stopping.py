"""End of a run whose metric gets no better."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.errors import UserError


class EarlyStopping(Callback):
    """Ends the run when a validation metric has not improved for some validations.

    Its best value and its patience are in the checkpoints, so that a resumed run stops where an uninterrupted one does.

    Args:
        metric: such as `eval/loss`.
        patience: validations in a row without an improvement, after which the run is saved and ends.
        min_delta: least change that counts as an improvement.
        mode: `min` if less is better, else `max`.

    Raises:
        UserError: a patience below 1, or another mode.
    """

    def __init__(self, metric: str = "eval/loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        if patience < 1 or mode not in ("min", "max"):
            raise UserError(f"EarlyStopping: expected patience >= 1 and mode min or max; found {patience}, {mode!r}")
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.best, self.bad = math.inf, 0  # least value so far, of the negative metric with `max`

    def on_evaluate(self, trainer: TrainerView, step: int, scores: Mapping[str, float]) -> None:
        """Compares the metric with the best one. Raises UserError if the validation has none of this name."""
        if self.metric not in scores:
            names = ", ".join(sorted(scores))
            raise UserError(f"EarlyStopping: no metric `{self.metric}`; the validation has {names}")
        value = scores[self.metric] if self.mode == "min" else -scores[self.metric]
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
            return
        self.bad += 1  # also for NaN
        if self.bad >= self.patience:
            trainer.request_stop(f"{self.metric} is no better after {self.bad} validations")

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the number of validations since."""
        return {"best": self.best if math.isfinite(self.best) else None, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        self.best, self.bad = math.inf if state["best"] is None else state["best"], state["bad"]
