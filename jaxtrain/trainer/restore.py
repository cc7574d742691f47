"""Start state of a run: a new one, a checkpoint, or a copy that a callback holds."""

from __future__ import annotations

import shlex
from typing import Any

import jax

from jaxtrain.callbacks.base import Callback
from jaxtrain.checkpoint import Checkpointer, read_manifest
from jaxtrain.core.program import Program, State
from jaxtrain.core.spike_detection import initial as empty_window
from jaxtrain.data.skipped_batches import merge_ranges
from jaxtrain.errors import ConfigError, Problem, UserError
from jaxtrain.sync.synchronizer import has_form, restart
from jaxtrain.trainer.compatibility import compare_configs, resume_guarantee
from jaxtrain.trainer.data.place import restore_data
from jaxtrain.trainer.initial_state import initial_state
from jaxtrain.trainer.training_run import TrainingRun

GUARANTEES = {
    "bitwise": "losses are bitwise those of an uninterrupted run",
    "fp32-tight": "losses are those of an uninterrupted run, to float32 rounding",
    "changed": "the config asks for different steps from here on",
}


def restore(trainer: TrainingRun, info: dict[str, Any]) -> tuple[State, int]:
    """Restores the newest good state, or that of step 0. Returns (state, step).

    Adds the resume guarantee to `info`, the fields of the start event.
    """
    checkpointer = trainer.checkpointer
    with trainer.ledger.phase("restore"):
        checkpointer.fetch()
    _print_warnings(trainer)
    newest = checkpointer.latest()
    if (found := _from_callbacks(trainer, -1 if newest is None else newest, info)) is not None:
        return found
    if newest is not None:
        _check_manifest(trainer, newest)
    with trainer.ledger.phase("restore"):
        chosen = checkpointer.latest_good()
    _print_warnings(trainer)
    if chosen is None:
        return _start_again(trainer, info)
    with trainer.ledger.phase("restore"):
        state, saved = restore_checkpoint(checkpointer, trainer.program, chosen)
    step = int(jax.device_get(state["step"]))
    _resume(trainer, info, step, saved, f"checkpoint {step} of {checkpointer.origin(step)}", checkpointer.origin(step))
    _resume_data(trainer, info, step, saved, checkpointer)
    return state, step


def _check_manifest(trainer: TrainingRun, step: int) -> None:
    """Raises UserError for a checkpoint that cannot be resumed, before its state is read.

    So the error of a changed model names its config key, not its tensors.
    """
    _, manifest = read_manifest(trainer.checkpointer.directory, step)
    if "imported" in manifest and step == 0:
        source = shlex.quote(manifest["imported"])
        message = f"holds imported weights and no state of training; train from them with model.from={source}"
        raise UserError(f"{trainer.dir} {message}")
    _config_changes(trainer, step, manifest)


def _start_again(trainer: TrainingRun, info: dict[str, Any]) -> tuple[State, int]:
    """Returns the state of step 0, if nothing was saved yet, or if the only checkpoint is the first and is damaged.

    Raises:
        UserError: a later checkpoint is damaged, or one in the durable tier could not be fetched: the user must decide
            to repeat that many steps.
    """
    checkpointer = trainer.checkpointer
    folder, damaged = checkpointer.directory, checkpointer.latest_damaged()
    if not checkpointer.is_empty():
        tier = trainer.config.checkpoint.durable
        raise UserError(f"no usable checkpoint in {folder}, and those in {tier} could not be fetched; see the warnings")
    if damaged is None:
        reason = f"no checkpoint in {folder} yet"
    elif damaged <= (trainer.config.checkpoint.every or 0):
        reason = f"no checkpoint in {folder} but one of step {damaged}, which is damaged"
    else:
        found = f"{damaged} is damaged (bad-{damaged}), and it is the only one"
        prune = f"jaxtrain checkpoint prune {shlex.quote(str(trainer.dir))} --set-aside"
        expected = f"expected a good copy there, or delete the damaged one ({prune}) to start from step 0"
        raise UserError(f"no usable checkpoint in {folder}: {found}; {expected}")
    trainer.console.print(f"{reason}: starting from step 0")
    return initial_state(trainer, info), 0


def _from_callbacks(trainer: TrainingRun, newest: int, info: dict[str, Any]) -> tuple[State, int] | None:
    """Returns a state later than checkpoint `newest` that a callback holds, such as an in-memory checkpoint."""
    with trainer.ledger.phase("restore"):
        source = trainer.callbacks.first(Callback.find_state, trainer, newest)
        if source is None:
            return None
        _config_changes(trainer, source.step, source.manifest)
        program = trainer.program
        if not has_form(program.saved_synchronizer(source.manifest), program.synchronizer, program.one):
            return None  # of other replicas; a checkpoint on disk can be read by them
        state = source.load(program.state)
    if state is None:
        return None
    _resume(trainer, info, source.step, source.manifest, f"step {source.step} of {source.name}", source.name)
    _resume_data(trainer, info, source.step, source.manifest, None)
    return state, source.step


def _resume(
    trainer: TrainingRun, info: dict[str, Any], step: int, saved: dict[str, Any], restored: str, origin: str
) -> None:
    """Prints the origin of a state, the changes of the config since, and the resume guarantee."""
    trainer.manifest["skips"] = saved.get("skips", [])
    trainer.load_callbacks(saved)
    for line in _config_changes(trainer, step, saved):
        trainer.console.print(f"changed   {line}")
    for name, now in trainer.manifest.get("objects", {}).items():
        if (before := saved.get("objects", {}).get(name, now)) != now:
            trainer.console.print(f"changed   {name} object: {before} -> {now}")
    level, reasons = resume_guarantee(saved, trainer.manifest)
    info |= {"guarantee": level, "reasons": reasons, "restored": origin}
    trainer.console.print(f"restored  {restored}")
    trainer.console.print(f"guarantee {GUARANTEES[level]}" + (f" ({'; '.join(reasons)})" if reasons else ""))


def _resume_data(
    trainer: TrainingRun, info: dict[str, Any], step: int, saved: dict[str, Any], checkpointer: Checkpointer | None
) -> None:
    """Brings data that is an iterable to its place after `step` steps, and prints how."""
    with trainer.ledger.phase("restore"):
        text = restore_data(trainer.data, checkpointer, step, saved, merge_ranges(saved.get("skips", ())))
    if text is not None:
        info["data"] = text
        trainer.console.print(f"data: {text}")


def _print_warnings(trainer: TrainingRun) -> None:
    """Prints the events of checkpoints since the last call."""
    for event in trainer.checkpointer.poll():
        trainer.console.print(f"warning   {event}")


def _config_changes(trainer: TrainingRun, step: int, saved: dict[str, Any]) -> list[str]:
    """Returns config changes since a checkpoint, a line each. Raises ConfigError if the run cannot resume with them."""
    same_data = saved.get("data") == trainer.manifest.get("data")
    changes, refused = compare_configs(saved["config"], trainer.manifest["config"], step, same_data)
    if not same_data and not refused:
        refused = ["data: the documents or the tokenizer differ from those at the start of the run; expected the same"]
    if refused:
        raise ConfigError([Problem(str(trainer.dir), "", f"{line}; or train under a new name") for line in refused])
    return changes


def restore_checkpoint(checkpointer: Checkpointer, program: Program, step: int) -> tuple[State, dict[str, Any]]:
    """Restores (state, manifest), also of other replicas, or if `guard` began or stopped to detect spikes since.

    Args:
        checkpointer: checkpoints of the run.
        program: whose state to restore; a window of recent losses that the checkpoint does not have starts empty.
        step: step that `Checkpointer.latest_good` returned; its files are not checked again.

    Raises:
        CheckpointError: the checkpoint does not fit.
    """
    _, saved = read_manifest(checkpointer.directory, step)
    had = saved["config"].get("guard", {}).get("spike", {}).get("action", "none") != "none"
    has_same = had == ("spikes" in program.one)
    one = {name: leaf for name, leaf in program.one.items() if name != "spikes" or has_same}
    before, after = program.saved_synchronizer(saved), program.synchronizer
    state, manifest = checkpointer.restore(step, before.abstract(one), partial=not has_same, verify=False)
    if not has_form(before, after, one):
        state = restart(before, after, state)
    if "spikes" in program.one and not has_same:
        placed = {name: leaf.sharding for name, leaf in program.state["spikes"].items()}
        state["spikes"] = jax.jit(lambda: after.spread(empty_window()), out_shardings=placed)()
    return state, manifest
