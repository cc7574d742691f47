"""Checkpoints of the best validations."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.errors import UserError


class BestCheckpoints(Callback):
    """Saves when a validation is among the best so far, and keeps these checkpoints besides the newest ones.

    Args:
        metric: such as `eval/loss`.
        keep: number of best checkpoints.
        mode: `min` if less is better, else `max`.

    Raises:
        UserError: less than 1, or another mode.
    """

    def __init__(self, metric: str = "eval/loss", keep: int = 1, mode: str = "min") -> None:
        if keep < 1 or mode not in ("min", "max"):
            raise UserError(f"BestCheckpoints: expected keep >= 1 and mode min or max; found {keep}, {mode!r}")
        self.metric, self.keep, self.mode = metric, keep, mode
        self.best: list[float] = []  # the best values so far, the best first

    def setup(self, trainer: TrainerView) -> None:
        """Tells the checkpointer what stays."""
        retention = trainer.checkpointer.retention
        retention.keep_best, retention.best = self.keep, self.metric
        retention.is_larger_better = self.mode == "max"
        trainer.manifest["retention"] = asdict(retention)  # for `jaxtrain checkpoint prune`

    def on_evaluate(self, trainer: TrainerView, step: int, scores: Mapping[str, float]) -> None:
        """Asks for a checkpoint if the value is among the best. Raises UserError without such a metric."""
        if self.metric not in scores:
            raise UserError(
                f"BestCheckpoints: no metric `{self.metric}`; the validation has {', '.join(sorted(scores))}"
            )
        value = scores[self.metric]
        ranked = sorted([*self.best, value], reverse=self.mode == "max")[: self.keep]
        if math.isfinite(value) and (value not in self.best) and value in ranked:
            self.best = ranked
            trainer.request_save(f"{self.metric} {value:.6g} is among the best")

    def state_dict(self) -> dict[str, Any]:
        """Returns the best values."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        self.best = list(state["best"])
