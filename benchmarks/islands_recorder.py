"""Callback of benchmarks/islands.py: writes down when steps and validations end, and makes a device slow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.callbacks.base import Callback, TrainerView

FILE = "times.jsonl"


class Recorder(Callback):
    """Appends a line to `FILE` in the folder of the island for each step and each validation.

    Args:
        pace: seconds that a step of each island takes besides its computation; the processor is free meanwhile.
    """

    def __init__(self, pace: Sequence[float] = ()) -> None:
        self._pace, self._began = tuple(pace), 0.0

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Waits for the step."""
        trainer.current_metrics()
        self._write(trainer, {"step": step})
        if self._pace:
            time.sleep(self._pace[int(os.environ["JAXTRAIN_ISLAND"])])

    def on_evaluate_begin(self, trainer: TrainerView, step: int) -> None:
        self._began = time.monotonic()

    def on_evaluate(self, trainer: TrainerView, step: int, scores: Mapping[str, float]) -> None:
        took = time.monotonic() - self._began
        self._write(trainer, {"step": step, "loss": scores["eval/loss"], "seconds": took})

    def _write(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        with open(trainer.dir / FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **record}) + "\n")
