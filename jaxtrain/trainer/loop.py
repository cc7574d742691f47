"""Training loop: next batch, step, log of the previous step, evaluation and save if due."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.callbacks.base import Callback
from jaxtrain.config import Config
from jaxtrain.core.components import NO_COMPONENTS, Components
from jaxtrain.core.program import Program, State
from jaxtrain.errors import NotSavedError, TrainingError
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.trainer.continuation import Resume
from jaxtrain.trainer.setup import new_run_directory, open_trainer
from jaxtrain.trainer.signals import Signals
from jaxtrain.trainer.trainer import Trainer

OUT_OF_MEMORY = (
    "a device ran out of memory; expected less per device: a larger step.microbatches, step.remat=full, a smaller "
    "data.global_batch or data.sequence, or a layout that shards more (fsdp, tp_sp)"
)
Reading = tuple[int, dict[str, jax.Array]]  # finished steps, and the metrics of the last one, still on the device


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Attributes:
        run_dir: run directory.
        step: finished steps.
        metrics: metrics of the last step, and of the last validation as `eval/...`.
        stopped_by: name of the signal that ended the run early, or None.
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


def train(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: Resume = False,
    console: ConsoleTracker | None = None,
    ledger: GoodputLedger | None = None,
    callbacks: Sequence[Callback] = (),
    components: Components = NO_COMPONENTS,
) -> Result:
    """Trains to `config.steps` and returns when the last checkpoint is on disk.

    Args:
        config: from `jaxtrain.load`.
        run_dir: run directory; default: a new one, DIR/NAME.
        resume: resume from the newest good checkpoint in `run_dir`. "auto": do so if DIR/NAME holds the run of this
            config, so that the same call may be made again, as schedulers do.
        console: shows progress; default: on the terminal.
        ledger: time accounting of this process; default: a new one.
        callbacks: called in this order, see `jaxtrain.callbacks`.
        components: Python objects in place of what the config names.

    Returns:
        the outcome.

    Raises:
        ValueError: bad input, one line for each problem.
        NotSavedError: the last checkpoint could not be written.
        TrainingError: a device ran out of memory.
        DivergedError: too many steps in a row made no update, because loss or gradients are bad.
        CorruptionError: a device computes wrong results (`guard.replica_check_every`).
    """
    directory = new_run_directory(config, resume) if run_dir is None else Path(run_dir)
    console = console or ConsoleTracker(config.steps)
    trainer, state, step = open_trainer(
        config, directory, console=console, resume=resume, ledger=ledger, callbacks=callbacks, components=components
    )
    try:
        with Signals() as signals:
            if signals.joint_save is not None:
                trainer.ticker.add(signals.joint_save)
            state, step, stopped_by = fit(trainer, state, step, signals)
            trainer.wait_for_checkpoints()
            trainer.report_checkpoints()
        if trainer.checkpointer.latest() != step:
            raise NotSavedError(f"the last checkpoint (step {step}) could not be written, see above")
        trainer.stop(step, stopped_by or "finished")
    except BaseException as error:
        trainer.stop(trainer.ledger.step, f"{type(error).__name__}: {error}".strip())
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TrainingError(OUT_OF_MEMORY) from error
        raise
    finally:
        trainer.close()
    trainer.callbacks.each(Callback.on_finish, trainer, state, stopped_by)
    metrics, command = dict(trainer.latest_metrics), resume_command(trainer, step)
    return Result(directory, step, metrics, stopped_by, command, state, trainer.program, trainer.data)


def fit(trainer: Trainer, state: State, step: int, signals: Signals) -> tuple[State, int, str | None]:
    """Runs steps until `config.steps` or a signal. Returns (state, finished steps, signal or None)."""
    config, ledger, callbacks, first = trainer.config, trainer.ledger, trainer.callbacks, step
    pending: Reading | None = None  # the previous step; its metrics are read while the next one runs
    stopped_by = None
    with trainer.batches() as batches:
        while step < config.steps and stopped_by is None:
            callbacks.each(Callback.on_step_begin, trainer, step)
            with ledger.phase("data"):
                batch = batches.batch_at(step)
            state, metrics = trainer.step(state, batch, step)
            log(trainer, pending)
            callbacks.each(Callback.on_step_dispatched, trainer, step)
            step += 1
            pending = step, metrics
            ledger.begin_step(step)
            state = callbacks.on_step_end(trainer, state, step)
            if step == first + 1:
                jax.block_until_ready(metrics)
                seconds = round(trainer.meter.end_compilation(step), 2)
                trainer.trackers.event("compiled", step=step, seconds=seconds)
                trainer.time_stages(state, batch)
            stopped_by, is_save_requested = signals.stop_at(step), signals.save_at(step)
            is_last, scores = step == config.steps, {}
            should_evaluate = bool(trainer.eval_sets) and (is_last or is_due(config.eval.every, step))
            should_save = is_last or stopped_by is not None or is_due(config.checkpoint.every, step)
            should_save = should_save or is_save_requested or trainer.checkpointer.is_retry_due(step)
            if should_evaluate:
                jax.block_until_ready(metrics)  # validation must not count as step time
                scores = trainer.evaluate(state, step)
            if should_evaluate or should_save:  # the guard must know the step before it is saved
                pending = log(trainer, pending, scores, now=True)
            if should_save:
                trainer.save(state, step, scores, is_last=is_last or stopped_by is not None)
            callbacks.each(Callback.after_save, trainer, state, step)
            trainer.report_checkpoints()
            if (rewound := trainer.rewind(state, step)) is not None:
                (state, step), pending = rewound, None
    log(trainer, pending, now=True)
    callbacks.each(Callback.on_train_end, trainer)
    return state, step, stopped_by


def is_due(every: int | None, step: int) -> bool:
    """Returns whether an action that happens every `every` steps is due after `step` steps."""
    return every is not None and step % every == 0


def log(trainer: Trainer, reading: Reading | None, scores: dict[str, float] | None = None, now: bool = False) -> None:
    """Reads the metrics of a finished step and logs them with its scores, every `log.every` steps or if `now`.

    Waits for that step, never for a later one. On other steps it reads only the metrics that callbacks watch; this
    waits, too, and so bounds the steps in flight.
    """
    if reading is None:
        return
    step, metrics = reading
    is_logged = now or is_due(trainer.config.log.every, step)
    names = metrics if is_logged else [name for name in trainer.callbacks.watched if name in metrics] or ["loss"]
    values = {name: float(value) for name, value in jax.device_get({name: metrics[name] for name in names}).items()}
    if is_logged:
        trainer.log(step, values, scores or {})
    trainer.callbacks.each(Callback.on_metrics, trainer, step, values)


def resume_command(trainer: Trainer, step: int) -> str:
    """Returns the command that resumes this run; for a finished run, with more steps."""
    called = sys.argv[0]
    is_found = Path(called).name != "jaxtrain" or shutil.which("jaxtrain") == os.path.abspath(called)
    program = "jaxtrain" if is_found else min(os.path.relpath(called), os.path.abspath(called), key=len)
    more = f" steps={step + trainer.config.steps}" if step >= trainer.config.steps else ""
    return f"{shlex.quote(program)} resume {shlex.quote(str(trainer.dir))}{more}"
