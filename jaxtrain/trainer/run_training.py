"""A run from its first step to its end: saves, closes, and says how it ended."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.callbacks.base import Callback
from jaxtrain.core.program import Program, State
from jaxtrain.distributed.runtime import generation, process_count
from jaxtrain.errors import BatchError, NotSavedError, TrainingError, UserError
from jaxtrain.io.figure import Plot
from jaxtrain.reports.history import RunHistory, read_history
from jaxtrain.reports.loss_plot import run_figure
from jaxtrain.reports.page import framed
from jaxtrain.trainer.joint_requests import JointRequests
from jaxtrain.trainer.loop import Progress, iterate
from jaxtrain.trainer.signals import Signals
from jaxtrain.trainer.training_run import TrainingRun

OUT_OF_MEMORY = (
    "a device ran out of memory; expected less per device: a larger step.microbatches, step.remat=full, a smaller "
    "data.global_batch or data.sequence, or a layout that shards more (fsdp, tp_sp)"
)
USED_TOO_LATE = (
    "callbacks: an array of `trainer.state` is used after the next step, which took its memory; expected a copy "
    "before: jax.tree.map(jnp.copy, ...)"
)


@dataclass(frozen=True, repr=False)
class Result:
    """Outcome of a run.

    Attributes:
        run_dir: run directory.
        step: finished steps.
        metrics: metrics of the last step, and of the last validation as `eval/...`.
        stopped_by: name of the signal, or the reason of the callback, that ended the run early; or None.
        resume_command: shell command that resumes the run.
        state: train state at the end.
        program: compiled program.
        data: training data.
    """

    run_dir: Path
    step: int
    metrics: dict[str, float]
    stopped_by: str | None
    resume_command: str
    state: State
    program: Program
    data: Any

    def report(self) -> RunHistory:
        """Returns the history of the run: time accounting, restarts, curves and checkpoints."""
        return read_history(self.run_dir)

    def plot(self, *names: str) -> Plot:
        """Draws metrics over steps; default: training and validation loss, and the learning rate."""
        return run_figure(self.report(), *names)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        ended = f"stopped by {self.stopped_by}" if self.stopped_by else "finished"
        return f"Result({self.run_dir}, step {self.step}, {ended}; {shown})"

    def _repr_html_(self) -> str:
        return framed(self.report())


def run_steps(trainer: TrainingRun, progress: Progress) -> Generator[None]:
    """Runs steps until `config.steps`, a signal or a request, then saves and closes. Yields after each step.

    A caller that leaves early ends the run as a signal does: the state is saved.
    """
    try:
        if process_count() > 1:
            trainer.requests = JointRequests()
            trainer.ticker.add(trainer.requests)
        with Signals(trainer.requests) as signals:
            try:
                yield from iterate(trainer, progress, signals)
            except GeneratorExit:
                progress.stopped_by = "the caller"
                trainer.save(progress.state, progress.step, {}, is_last=True)
                trainer.callbacks.each(Callback.on_train_end, trainer)
            trainer.wait_for_checkpoints()
            trainer.report_checkpoints()
        if trainer.checkpointer.latest() != progress.step:
            raise NotSavedError(f"the last checkpoint (step {progress.step}) could not be written, see above")
        trainer.stop(progress.step, progress.stopped_by or "finished")
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".strip()
        trainer.callbacks.each(Callback.on_exception, trainer, error)
        # A launcher ends the others itself, and says which one failed; of data that failed all of them know.
        if generation() is None and not isinstance(error, BatchError):
            trainer.requests.report_failure(text)
        trainer.stop(trainer.ledger.step, text)
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TrainingError(OUT_OF_MEMORY) from error
        if str(error).startswith("Array has been deleted"):  # of a callback that keeps arrays of `trainer.state`
            raise UserError(USED_TOO_LATE) from error
        raise
    finally:
        trainer.close()
    trainer.callbacks.each(Callback.on_finish, trainer, progress.state, progress.stopped_by)


def result_of(trainer: TrainingRun, progress: Progress) -> Result:
    """Returns the outcome of a run that has ended."""
    return Result(
        trainer.dir, progress.step, dict(trainer.latest_metrics), progress.stopped_by,
        resume_command(trainer, progress.step), progress.state, trainer.program, trainer.data,
    )  # fmt: skip


def resume_command(trainer: TrainingRun, step: int) -> str:
    """Returns the command that resumes this run; for a finished run, with more steps."""
    called = sys.argv[0]
    is_found = Path(called).name != "jaxtrain" or shutil.which("jaxtrain") == os.path.abspath(called)
    program = "jaxtrain" if is_found else min(os.path.relpath(called), os.path.abspath(called), key=len)
    steps, epochs = trainer.config.steps, trainer.config.epochs
    longer = f" steps={step + steps}" if epochs is None else f" epochs={2 * epochs}"
    more = longer if step >= steps else ""
    return f"{shlex.quote(program)} resume {shlex.quote(str(trainer.dir))}{more}"
