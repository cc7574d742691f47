"""The train loop, one screen long: next batch, step, log the step before, maybe evaluate, maybe save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.callbacks.profiler import Profile
from jaxtrain.checkpoint import Committed
from jaxtrain.config import Config
from jaxtrain.core.evaluation import validate
from jaxtrain.core.program import Program, State
from jaxtrain.errors import NotSavedError, TrainingError
from jaxtrain.trackers.console import Screen
from jaxtrain.trackers.goodput import Ledger
from jaxtrain.trainer.signals import Signals
from jaxtrain.trainer.trainer import Run, fresh_directory, open_run, resume_command, time_stages

OUT_OF_MEMORY = (
    "a device ran out of memory; expected less per device: a larger step.accumulate, step.remat=full, a smaller "
    "data.global_batch or data.sequence, or a layout that shards more (fsdp, tp_sp)"
)
Reading = tuple[int, dict[str, jax.Array]]  # steps done, and the metrics of the last one, still on the device


@dataclass(frozen=True)
class Result:
    """What a run came to. `metrics` are those of the last step, with the last validation's as `eval/...`."""

    run_dir: Path
    step: int
    metrics: dict[str, float]
    stopped_by: str | None
    resume: str
    state: State
    program: Program
    data: Any


def train(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: bool = False,
    profile: tuple[int, int] | None = None,
    screen: Screen | None = None,
    ledger: Ledger | None = None,
    deadline: float | None = None,
) -> Result:
    """Trains to `config.steps` and returns when the last checkpoint is on disk.

    Args:
        config: from `jaxtrain.load`.
        run_dir: where to write; default: a new folder DIR/NAME.
        resume: go on from the newest good checkpoint in `run_dir`.
        profile: (first, last) steps to trace for XProf into RUN_DIR/profile.
        screen: where progress is shown; default: the terminal.
        ledger: of this process's time; default: one that begins now.
        deadline: seconds a step or its data may hang before the process is ended; default: as measured; 0: never.

    Raises:
        ValueError: bad input, in one line for each problem.
        NotSavedError: the last checkpoint could not be written.
        DivergedError: steps stay without an update, because loss or gradients are bad.
        CorruptionError: a device computes wrongly (`guard: [check@STEPS]`).
    """
    directory = Path(run_dir) if run_dir is not None else fresh_directory(config)
    screen = screen or Screen(config.steps)
    run, state, done = open_run(config, directory, screen=screen, resume=resume, ledger=ledger, deadline=deadline)
    try:
        with Signals() as signals, run.faults:
            state, done, stopped_by = fit(run, state, done, signals, Profile(directory, profile, run.ledger))
            run.finish()
            report_checkpoints(run)
        if run.checkpoints.latest() != done:
            raise NotSavedError(f"the last checkpoint (step {done}) could not be written, see above")
        run.stop(done, stopped_by or "finished")
        return Result(
            directory, done, dict(run.latest), stopped_by, resume_command(run, done), state, run.program, run.data
        )
    except BaseException as error:
        run.stop(run.ledger.step, f"{type(error).__name__}: {error}".strip())
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TrainingError(OUT_OF_MEMORY) from error
        raise
    finally:
        run.close()


def fit(run: Run, state: State, done: int, signals: Signals, profile: Profile) -> tuple[State, int, str | None]:
    """Steps until the config's last one or a signal: (state, steps done, signal or None)."""
    config, ledger, first = run.config, run.ledger, done
    before: Reading | None = None
    stopped_by = None
    with run.feed() as batches:
        while done < config.steps and stopped_by is None:
            report_profile(run, profile.at(done))
            with ledger.phase("data"):
                batch = batches.at(done)
            state, metrics = run.advance(state, batch, done)
            log(run, before)  # the step before, while this one runs
            run.share()
            done += 1
            before = done, metrics
            ledger.at(done)
            state = run.faults.after(state, done)
            if done == first + 1:
                jax.block_until_ready(metrics)
                run.observers.event("compiled", step=done, seconds=round(run.meter.compiled(done), 2))
                time_stages(run, state, batch)
            stopped_by = signals.stop_at(done)
            is_end, scores = done == config.steps, {}
            validates = bool(run.sets) and (is_end or due(config.eval.every, done))
            saves = is_end or stopped_by is not None or due(config.checkpoint.every, done)
            saves = saves or run.checkpoints.saves_again(done)
            if validates:
                jax.block_until_ready(metrics)  # the step's time is its own
                scores = evaluate(run, state, done)
            if validates or saves:  # nothing is saved while steps are bad
                before = log(run, before, scores, now=True)
            if saves and run.admits(state, done, must=is_end or stopped_by is not None):
                run.save(done, state, scores)
            run.keep(done, state)
            report_checkpoints(run)
            if run.guard.spike is not None:
                (state, done), before = run.go_back(state, done), None
    log(run, before, now=True)
    report_profile(run, profile.close())
    return state, done, stopped_by


def due(every: int | None, done: int) -> bool:
    """Whether something happens after `done` steps that happens every so many."""
    return every is not None and done % every == 0


def log(run: Run, reading: Reading | None, scores: dict[str, float] | None = None, now: bool = False) -> None:
    """Reads a finished step's metrics and hands them on with its validation's: every `log.every` steps, and `now`.

    Waits for that step, never for a later one. Raises DivergedError where too many steps are bad.
    """
    if reading is None:
        return
    done, metrics = reading
    if not now and not due(run.config.log.every, done):
        run.guard.see(done, run.guard.read(metrics))  # waits too, which bounds the steps in flight
        return
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    run.log(done, values, scores or {})
    run.guard.see(done, values)


def evaluate(run: Run, state: State, done: int) -> dict[str, float]:
    """Metrics of all validation sets, of the averaged weights where there are such."""
    run.faults.at("eval", done)
    with run.ledger.phase("eval"):
        means = validate(run.program, run.sets, state.get("ema", state["params"]), run.config.eval.batches)
    run.observers.event("eval", step=done, **means)
    return means


def report_checkpoints(run: Run) -> None:
    """Passes on what became of the checkpoints."""
    for event in run.checkpoints.poll():
        run.observers.event(event.kind, **event.shown())
        if isinstance(event, Committed) and run.config.log.checkpoints:
            run.observers.artifact(run.checkpoints.store.path(event.step))


def report_profile(run: Run, path: Path | None) -> None:
    """Says where a trace was written."""
    if path is not None:
        run.observers.artifact(path)
