"""Construction of a trainer: data, program, checkpoints, trackers, and the start state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxtrain.callbacks.base import Callback, CallbackList
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.durable import run_location
from jaxtrain.config import Config
from jaxtrain.config.run_dir import absolute, create_directory, free_directory, write_config
from jaxtrain.config.show import as_dict
from jaxtrain.core.batch_spec import example_row
from jaxtrain.core.components import NO_COMPONENTS, Components, object_names
from jaxtrain.core.program import Program, State, build_program
from jaxtrain.data.dataset import open_datasets, open_validation_sets
from jaxtrain.data.epochs import with_steps
from jaxtrain.data.objects.iterables import IterableData
from jaxtrain.distributed import runtime
from jaxtrain.distributed.multihost import broadcast, first_message
from jaxtrain.distributed.save_fence import save_fence
from jaxtrain.errors import DataError, UserError
from jaxtrain.hlo.collectives import check_permutes_on_first_call
from jaxtrain.io.ticker import Ticker
from jaxtrain.kernels.cross_entropy import recomputes
from jaxtrain.models.flops import Flops, decoder_flops, user_flops
from jaxtrain.models.spec import has_token_rows, is_decoder, vocabulary_size
from jaxtrain.optim.any_optax import is_schedule_free
from jaxtrain.planning.hardware.peak import device_peak
from jaxtrain.sharding import layout as layouts
from jaxtrain.trackers.base import Tracker, TrackerList, build_trackers
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trackers.files import furthest_step
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.trackers.meter import Meter, device_memory
from jaxtrain.trainer.compatibility import environment
from jaxtrain.trainer.continuation import Resume, can_continue
from jaxtrain.trainer.data.open_objects import open_eval_data, open_objects
from jaxtrain.trainer.data.place import described
from jaxtrain.trainer.initial_state import check_exists, initial_state
from jaxtrain.trainer.restore import restore
from jaxtrain.trainer.training_run import TrainingRun


def open_trainer(
    config: Config,
    directory: Path,
    *,
    console: ConsoleTracker,
    resume: Resume,
    ledger: GoodputLedger | None = None,
    callbacks: Sequence[Callback] = (),
    trackers: Sequence[Tracker] = (),
    components: Components = NO_COMPONENTS,
) -> tuple[TrainingRun, State, int]:
    """Builds a trainer that is ready for its next step. Returns (trainer, state, finished steps).

    Args:
        config: config of the run.
        directory: run directory.
        console: shows progress.
        resume: resume from the newest good checkpoint; "auto": if the directory holds the run of this config.
        ledger: time accounting of this process; default: a new one.
        callbacks: callbacks of the run.
        trackers: receive metrics and events of process 0, beside those of `log`.
        components: Python objects in place of what the config names.

    Raises:
        UserError: bad input, a directory of another run, or a config that the checkpoint of a resumed run does not
            accept.
    """
    if config.optimizer.is_object and components.optimizer is None:
        raise UserError("optimizer: the run has one that was given in Python; expected it again, as `optimizer=...`")
    ledger = ledger or GoodputLedger()
    devices = runtime.start(config.simulate)
    layouts.resolve_layout(config.layout, config.mesh, config.axis_rules, len(devices))  # before hours of tokenizing
    is_main = jax.process_index() == 0
    console.console.quiet = not is_main
    data, eval_sets = open_data(config, console, components)
    config = with_steps(config, data)
    console.status.total = config.steps
    hooks = CallbackList(callbacks)
    console.say("building the model")
    program = _build(hooks.program_config(config, directory), data, devices, components)
    is_continued = resume == "auto" and _holds_run(config, directory)
    if not (resume is True or is_continued) and config.model.weights.path is not None:
        check_exists(config.model.weights.path)
    if is_main:
        create_directory(directory)
    checkpointer, ticker = open_checkpointer(config, directory), Ticker()
    try:
        resume = resume is True or is_continued or (resume == "auto" and not checkpointer.is_empty())
        if not resume and not checkpointer.is_empty():
            where = directory if checkpointer.store.marked() else run_location(config.checkpoint.durable, directory)
            raise UserError(f"{where} already holds a run; expected `jaxtrain resume`, or another `name`")
        members = [*build_trackers(config.log, config.name, directory, is_main), *(trackers if is_main else ())]
        trainer = _assemble(
            config, directory, program, data, eval_sets, checkpointer, members, console, ledger, ticker, hooks
        )
        hooks.each(Callback.setup, trainer)
        info = start_info(trainer)
        console.say("creating the parameters")
        state, step = restore(trainer, info) if resume else (initial_state(trainer, info), 0)
        if step > config.steps:
            raise UserError(f"steps: {config.steps} is less than the {step} already done in {directory}")
        trainer.state = state
        if is_main:
            write_config(directory, config)
        _begin(trainer, info, step)
    except BaseException:
        ticker.close()
        checkpointer.close()
        raise
    return trainer, state, step


def _build(config: Config, data: Any, devices: Sequence[Any], components: Components) -> Program:
    vocab = vocabulary_size(config.model, getattr(data, "vocab", None))
    program = build_program(config, vocab, devices, example_row(config.data, data), components)
    if program.synchronizer.strategy.mixes_batches and isinstance(data, IterableData):
        message = f"{config.sync.strategy} gives each replica the rows of a step of its own, and {data.name} is read in"
        raise DataError(f"sync.strategy: {message} order; expected data with `batch(step, rows)`, or arrays")
    if program.gradients.pipeline:
        synchronizer = program.synchronizer.with_checked_steps(check_permutes_on_first_call)
        program = replace(program, step=check_permutes_on_first_call(program.step), synchronizer=synchronizer)
    return program


def _begin(trainer: TrainingRun, info: dict[str, Any], step: int) -> None:
    """Reports the start to trackers and callbacks."""
    trainer.ledger.furthest_step = max(furthest_step(trainer.dir), step)
    trainer.ledger.begin_step(step)
    trainer.trackers.start(info | {"step": step})
    trainer.callbacks.each(Callback.on_train_begin, trainer, step)
    trainer.ledger.begin("compile")


def open_data(
    config: Config, console: ConsoleTracker, components: Components = NO_COMPONENTS
) -> tuple[Any, dict[str, Any]]:
    """Opens the training data, and the validation sets by the prefix of their metrics.

    Builds a missing token cache.

    Raises:
        UserError: bad data, or an iterable whose first batch differs between processes.
    """
    console.say("opening the data")
    if config.data.is_object:
        return open_objects(config, components)
    progress = _cache_progress(console)
    data, held_out = open_datasets(config.data, config.seed, progress)
    if components.eval_data is not None:
        held_out = open_eval_data(config, components)
    sets = {"eval/": held_out} if held_out is not None else {}
    named = open_validation_sets(config.data, config.eval.sets, config.seed, progress)
    return data, sets | {f"eval/{name}/": split for name, split in named.items()}


def open_checkpointer(config: Config, directory: Path) -> Checkpointer:
    """Opens the checkpoints of a run, local and durable."""
    options = config.checkpoint
    return Checkpointer(
        directory / "checkpoints", keep=options.keep, keep_best=options.keep_best, best=options.best_metric,
        durable=run_location(options.durable, directory), durable_every=options.durable_every,
        fence=save_fence(),
    )  # fmt: skip


def _assemble(
    config: Config, directory: Path, program: Program, data: Any, eval_sets: Any, checkpointer: Checkpointer,
    trackers: Sequence[Tracker], console: ConsoleTracker, ledger: GoodputLedger, ticker: Ticker,
    callbacks: CallbackList,
) -> TrainingRun:  # fmt: skip
    is_main = jax.process_index() == 0
    saved = as_dict(absolute(config))
    manifest = environment(
        saved, program.sharder.mesh, data=getattr(data, "fingerprint", None),
        schedule_free=is_schedule_free(program.state["opt_state"]), objects=object_names(program.components),
        **described(data),
    )  # fmt: skip
    members = TrackerList([*trackers, *([console] if is_main else [])], console.print)
    has_tokens = has_token_rows(config.model, config.data)
    items = config.data.global_batch * (config.data.sequence if has_tokens else 1)
    flops, peak = _flops(config, program, data, items), device_peak(jax.local_devices()[0], config.log.peak_tflops)
    memory = device_memory(jax.local_devices())
    unit = "tokens" if has_tokens else "samples"
    trained = program.synchronizer.strategy.trained_batches
    meter = Meter(ledger, items, len(jax.devices()), flops=flops, peak=peak, memory=memory, unit=unit, trained=trained)
    return TrainingRun(
        config, directory, program, data, eval_sets, checkpointer, members, console, ledger, meter, ticker, manifest,
        callbacks,
    )  # fmt: skip


def new_run_directory(config: Config, resume: Resume) -> Path:
    """Returns DIR/NAME, or a free folder beside it, see `free_directory`: a run never overwrites another.

    If `resume` is "auto" it is DIR/NAME, and with several processes, too, which `open_trainer` checks: they cannot
    agree on a number before they are connected.
    """
    return config.run_dir if resume == "auto" or runtime.process_count() > 1 else free_directory(config)


def _holds_run(config: Config, directory: Path) -> bool:
    """Returns whether a directory holds the run of a config, as process 0 sees it; see `can_continue`."""
    is_continued, problem = False, None
    if jax.process_index() == 0:
        try:
            is_continued = can_continue(config, directory)
        except UserError as error:
            problem = str(error)
    if problem := first_message(problem):
        raise UserError(problem)
    return broadcast(int(is_continued)) == 1


def start_info(trainer: TrainingRun) -> dict[str, Any]:
    """Returns the fields of the start event."""
    config, manifest, meter = trainer.config, trainer.manifest, trainer.meter
    info: dict[str, Any] = {"name": config.name, "steps": config.steps, "config": manifest["config"]}
    if (generation := runtime.generation()) is not None:
        info["generation"] = generation
    info["unigram_entropy"] = getattr(trainer.data, "unigram_entropy", None)
    if meter.flops is not None and meter.peak is not None:
        flops = f"{meter.flops.model:.4g} per token ({meter.flops.convention})"
        info |= {"flops": flops, "peak": str(meter.peak)}
    return info | {key: manifest[key] for key in ("mesh", "versions", "processes")}


def _cache_progress(console: ConsoleTracker) -> Any:
    shown = {"tenth": -1}

    def progress(done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth != shown["tenth"]:
            shown["tenth"] = tenth
            console.print(f"data  building the token cache: {10 * tenth}% of {total / 2**20:.1f} MiB")

    return progress


def _flops(config: Config, program: Program, data: Any, items: int) -> Flops | None:
    """Returns the FLOPs of each of the `items` of a global batch: tokens of a token model, else rows."""
    if is_decoder(config.model):
        vocab = program.model_def.parameters["embed"]["table"].shape[0]
        again = recomputes(vocab, config.loss.vocab_chunks, program.sharder)
        return decoder_flops(config.model, vocab, config.data.sequence, config.step.saved_values, again)
    host = example_row(config.data, data) or data.batch(0, slice(0, 1))
    shapes = {name: (config.data.global_batch, *value.shape[1:]) for name, value in host.items()}
    return user_flops(program.model_def.abstract(), shapes, items)
