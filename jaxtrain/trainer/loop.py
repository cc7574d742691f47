"""Training loop: next batch, step, log of the previous step, evaluation and save if due."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import jax

from jaxtrain.callbacks.base import Callback
from jaxtrain.core.program import State
from jaxtrain.errors import BatchError, EndOfData
from jaxtrain.trainer.metric_values import numbers
from jaxtrain.trainer.requests import Request
from jaxtrain.trainer.signals import Signals
from jaxtrain.trainer.training_run import TrainingRun

Reading = tuple[int, dict[str, jax.Array]]  # finished steps, and the metrics of the last one, still on the device


@dataclass
class Progress:
    """Place of a run.

    Attributes:
        state: train state.
        step: finished steps.
        stopped_by: reason of an early end.
        pending: metrics of the last step, which are read while the next one runs; None: they are logged.
        scores: of validations after that step, not logged yet.
    """

    state: State
    step: int
    stopped_by: str | None = None
    pending: Reading | None = None
    scores: dict[str, float] = field(default_factory=dict)


def iterate(trainer: TrainingRun, progress: Progress, signals: Signals) -> Iterator[None]:
    """Runs steps until `config.steps`, a signal or a request, which is `stopped_by` then. Yields after each step."""
    config, ledger, callbacks, first = trainer.config, trainer.ledger, trainer.callbacks, progress.step
    progress.pending, is_end = None, trainer.checkpointer.latest() == first
    with trainer.batches() as batches:
        while progress.step < config.steps and progress.stopped_by is None:
            callbacks.each(Callback.on_step_begin, trainer, progress.step)
            try:
                with ledger.phase("data"):
                    batch = batches.batch_at(progress.step)
            except (EndOfData, BatchError) as end:
                if progress.step == 0:
                    raise
                progress.stopped_by = str(end)
                finish(trainer, progress)
                if isinstance(end, BatchError):
                    trainer.wait_for_checkpoints()
                    trainer.report_checkpoints()
                    raise
                break
            progress.state, metrics = trainer.step(progress.state, batch, progress.step)
            log(trainer, progress)
            callbacks.each(Callback.on_step_dispatched, trainer, progress.step)
            progress.step += 1
            step, trainer.on_device = progress.step, metrics
            progress.pending = step, metrics
            ledger.begin_step(step)
            progress.state = trainer.state = callbacks.replace_state(trainer, progress.state, step)
            if step == first + 1:
                jax.block_until_ready(metrics)
                seconds = round(trainer.meter.end_compilation(step), 2)
                trainer.trackers.event("compiled", step=step, seconds=seconds)
                trainer.time_stages(progress.state, batch)
            callbacks.each(Callback.on_step_end, trainer, step)
            requests, scores = requests_due(trainer, step), {}
            is_evaluation_due = step == config.steps or is_due(config.eval.every, step) or "evaluate" in requests
            should_evaluate = bool(trainer.eval_sets) and is_evaluation_due
            if should_evaluate:
                jax.block_until_ready(metrics)  # validation must not count as step time
                scores = progress.scores = trainer.evaluate(progress.state, step)
                requests |= requests_due(trainer, step)  # of callbacks that know the scores
            progress.stopped_by = signals.stop_at(step)
            if progress.stopped_by is None and "stop" in requests:
                progress.stopped_by = requests["stop"].reason
            is_end = step == config.steps or progress.stopped_by is not None
            should_save = is_end or is_due(config.checkpoint.every, step) or "save" in requests
            should_save = should_save or trainer.checkpointer.is_retry_due(step)
            if should_evaluate or should_save:  # the guard must know the step before it is saved
                log(trainer, progress, now=True)
            if should_save:
                trainer.save(progress.state, step, scores, is_last=is_end)
            callbacks.each(Callback.after_save, trainer, progress.state, step)
            trainer.report_checkpoints()
            if (rewound := trainer.rewind(progress.state, step)) is not None:
                (progress.state, progress.step), progress.pending = rewound, None
                trainer.state = progress.state
            elif "rewind" in requests and not is_end:
                go_back(trainer, progress, requests["rewind"])
            try:
                yield
            except GeneratorExit:  # the caller leaves
                log(trainer, progress, now=True)
                raise
            if progress.scores:
                finish_validation(trainer, progress)
    if progress.stopped_by is None and not is_end:  # a callback has given it the state after the last step
        finish(trainer, progress)
    log(trainer, progress, now=True)
    callbacks.each(Callback.on_train_end, trainer)


def finish(trainer: TrainingRun, progress: Progress) -> None:
    """Logs, validates and saves the last state where no step has done so."""
    scores = progress.scores = trainer.evaluate(progress.state, progress.step) if trainer.eval_sets else {}
    log(trainer, progress, now=True)
    trainer.save(progress.state, progress.step, scores, is_last=True)


def validate_between_steps(trainer: TrainingRun, progress: Progress) -> dict[str, float]:
    """Validates as the loop does, for its caller. What follows from the scores is done when the loop goes on."""
    jax.block_until_ready(trainer.on_device)  # the step must not count as validation
    scores = trainer.evaluate(progress.state, progress.step)
    progress.scores |= scores
    return scores


def finish_validation(trainer: TrainingRun, progress: Progress) -> None:
    """Logs a validation of the caller, and saves and stops if callbacks that know its scores ask for it."""
    step, scores = progress.step, progress.scores
    log(trainer, progress, now=True)
    requests = requests_due(trainer, step)
    if "stop" in requests:
        progress.stopped_by = progress.stopped_by or requests["stop"].reason
    if "stop" in requests or "save" in requests:
        trainer.save(progress.state, step, scores, is_last=progress.stopped_by is not None)
    if "rewind" in requests and progress.stopped_by is None:
        go_back(trainer, progress, requests["rewind"])


def go_back(trainer: TrainingRun, progress: Progress, request: Request) -> None:
    """Carries out a request to go back, after the log of the last step."""
    log(trainer, progress, now=True)
    progress.state, progress.step = trainer.go_back(progress.state, progress.step, request)
    trainer.state = progress.state


def requests_due(trainer: TrainingRun, step: int) -> dict[str, Request]:
    """Returns the requests to carry out after a step, by their kind. Carries out calls of callbacks."""
    requests = trainer.requests.due(step)
    for call in (request for request in requests if request.kind == "call"):
        trainer.callbacks.each(Callback.on_call, trainer, step, call.reason)
    return {request.kind: request for request in requests}


def is_due(every: int | None, step: int) -> bool:
    """Returns whether an action that happens every `every` steps is due after `step` steps."""
    return every is not None and step % every == 0


def log(trainer: TrainingRun, progress: Progress, now: bool = False) -> None:
    """Reads the metrics of the last step and logs them with its scores, every `log.every` steps or if `now`.

    Waits for that step, never for a later one. On other steps it reads only the metrics that callbacks watch; this
    waits, too, and so bounds the steps in flight. Scores of a step that is logged already get a record of their own.
    """
    reading, scores = progress.pending, progress.scores
    progress.pending, progress.scores = None, {}
    if reading is None:
        if scores:
            trainer.log(progress.step, {}, scores)
        return
    step, metrics = reading
    is_logged = now or is_due(trainer.config.log.every, step)
    names = metrics if is_logged else [name for name in trainer.callbacks.watched if name in metrics] or ["loss"]
    values = numbers({name: metrics[name] for name in names})
    if is_logged:
        trainer.log(step, values, scores)
    trainer.callbacks.each(Callback.on_metrics, trainer, step, values)
