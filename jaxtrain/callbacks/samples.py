"""Loss plot and text sample at the end of a run."""

from __future__ import annotations

import jax

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.core.program import State
from jaxtrain.core.state import evaluated_parameters
from jaxtrain.inference.model import text_streamer, text_tokenizer
from jaxtrain.reports.loss_plot import plot_loss


class LossPlot(Callback):
    """Draws RUN_DIR/loss.png when a run ends."""

    def on_finish(self, trainer: TrainerView, state: State, stopped_by: str | None) -> None:
        """Draws the plot and prints its path."""
        if jax.process_index() == 0 and "loss" in trainer.latest_metrics:
            trainer.console.print(f"plot  {plot_loss(trainer.dir)}")


PROMPT = "\n"


class Samples(Callback):
    """Generates `log.sample_tokens` tokens when a run of one process ends."""

    def on_finish(self, trainer: TrainerView, state: State, stopped_by: str | None) -> None:
        """Generates and prints the sample."""
        log = trainer.config.log
        if not log.sample_tokens or stopped_by or jax.process_count() > 1:
            return
        tokenizer = text_tokenizer(trainer.config.model, trainer.config.data)
        with trainer.console.activity("compiling and generating a sample (log.sample_tokens)"):
            stream = text_streamer(trainer.program, tokenizer, evaluated_parameters(trainer.program.agreed(state)))
            text = "".join(stream(PROMPT, log.sample_tokens, trainer.config.seed))
        trainer.console.print("sample", *("  | " + line for line in text.splitlines()))
