"""Exchanges between replicas in the log."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.errors import join_words

LEFT_OUT = "left_out"
# Of the last exchange, also if its own step is not logged.
LOGGED = ("consensus_distance", "mixing_distance", "exchanged_bytes", "received_bytes")


class ExchangeMonitor(Callback):
    """Logs the distance of the replicas at the last exchange and its bytes, and names replicas that were left out."""

    watched = (LEFT_OUT,)

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Keeps the metrics of an exchange for the next record."""
        trainer.add_metrics({name: trainer.on_device[name] for name in LOGGED if name in trainer.on_device})

    def on_metrics(self, trainer: TrainerView, step: int, values: Mapping[str, float]) -> None:
        """Warns of replicas that were left out of the exchange of a step."""
        left_out = [name.partition("/")[2] for name in values if name.startswith(f"{LEFT_OUT}/")]
        if left_out:
            who = f"replica{'s' if len(left_out) > 1 else ''} {join_words(left_out, 'and')}"
            text = f"{who} left out of the exchange at step {step}: parameters that are not finite"
            trainer.trackers.event("warning", step=step, text=f"{text}; continued from those of the others")
