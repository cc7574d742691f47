"""The state that a run begins with: fresh, of imported weights, of a checkpoint, or of the nodes' memory."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxtrain.checkpoint import Checkpointer, CheckpointError, read_manifest
from jaxtrain.config import ConfigError, guards
from jaxtrain.core.program import Program, State
from jaxtrain.core.spike_detection import initial as empty_window
from jaxtrain.errors import Problem, UserError
from jaxtrain.interop.config_json import opened
from jaxtrain.interop.load_weights import load as load_weights
from jaxtrain.interop.tensor_map import PLACES
from jaxtrain.optim.optimizers import ema_init
from jaxtrain.trainer.compatibility import compare_configs, resume_guarantee

if TYPE_CHECKING:
    from jaxtrain.trainer.trainer import Run

PROMISES = {
    "bitwise": "losses bitwise those of an uninterrupted run",
    "fp32-tight": "losses those of an uninterrupted run, to float32 rounding",
    "changed": "none: the config asks for other steps from here on",
}


def initial(program: Program) -> State:
    """The state of step 0: fresh, or with the weights of `model.from`."""
    state, source = program.init(), program.config.model.from_
    if source is None:
        return state
    for leaf in jax.tree.leaves(state["params"]):
        leaf.delete()  # room for what takes its place
    folder = Path(os.path.expanduser(source))
    state["params"] = load_weights(folder, PLACES[opened(folder)[0].name], program.state["params"])
    if "ema" in state:
        placed = jax.tree.map(lambda leaf: leaf.sharding, program.state["ema"])
        state["ema"] = jax.jit(ema_init, out_shardings=placed)(state["params"])
    return state


def restore(run: Run, info: dict[str, Any]) -> tuple[State, int]:
    """The newest good state, and what the resumed run may promise; that of step 0 where there is no other."""
    checkpoints = run.checkpoints
    with run.ledger.phase("restore"):
        checkpoints.fetch()
    _report(run)
    if (found := _from_peers(run, info)) is not None:
        return found
    if (newest := checkpoints.latest()) is not None:
        _look_at(run, newest)
    with run.ledger.phase("restore"):
        step = checkpoints.choose()
    _report(run)
    if step is None:
        return _afresh(run)
    with run.ledger.phase("restore"):
        state, saved = restored(checkpoints, run.program.state, step)
    done = int(jax.device_get(state["step"]))
    _go_on(run, info, done, saved, ("checkpoint", checkpoints.origin(done)))
    return state, done


def _look_at(run: Run, step: int) -> None:
    """Refuses what cannot go on, before the state is read: a changed model is told by its key, not by its tensors."""
    _, manifest = read_manifest(run.checkpoints.directory, step)
    if "imported" in manifest and step == 0:
        source = shlex.quote(manifest["imported"])
        message = f"holds imported weights and no state of training; train from them with model.from={source}"
        raise UserError(f"{run.dir} {message}")
    _refuse(run, step, manifest)


def _afresh(run: Run) -> tuple[State, int]:
    """The state of step 0, where nothing was saved yet, or where the first checkpoint is damaged and there is no other.

    Raises UserError where a later one is, or the durable tier holds what could not be fetched: that so many steps are
    done again is for the user to say.
    """
    folder, damaged = run.checkpoints.directory, run.checkpoints.damaged()
    if not run.checkpoints.is_empty():
        tier = run.config.checkpoint.durable
        raise UserError(f"no usable checkpoint in {folder}, and those in {tier} could not be fetched; see the warnings")
    if damaged is None:
        why = f"no checkpoint in {folder} yet"
    elif damaged <= (run.config.checkpoint.every or 0):
        why = f"no checkpoint in {folder} but one of step {damaged}, which is damaged"
    else:
        found = f"{damaged} is damaged (bad-{damaged}), and there is no other"
        begin = f"jaxtrain checkpoint prune {shlex.quote(str(run.dir))} --set-aside"
        expected = f"give a good copy back, or delete what is damaged ({begin}) to begin again at step 0"
        raise UserError(f"no usable checkpoint in {folder}: {found}; {expected}")
    run.screen.print(f"{why}: starting from step 0")
    return initial(run.program), 0


def _from_peers(run: Run, info: dict[str, Any]) -> tuple[State, int] | None:
    """What the nodes' memory has of a later step than the newest checkpoint."""
    if run.peers is None:
        return None
    kept = run.checkpoints.latest()
    with run.ledger.phase("restore"):
        found = run.peers.newest(after=-1 if kept is None else kept)
        if found is None:
            return None
        _refuse(run, found.step, found.manifest)
        state = run.peers.restore(found, run.program.state)
    if state is None:
        return None
    _go_on(run, info, found.step, found.manifest, ("step", "the memory of the nodes"))
    return state, found.step


def _go_on(run: Run, info: dict[str, Any], done: int, saved: dict[str, Any], source: tuple[str, str]) -> None:
    """Says where a state came from, what the config changed since, and what the resumed run may promise."""
    run.manifest["skips"] = saved.get("skips", [])
    for line in _refuse(run, done, saved):
        run.screen.print(f"changed  {line}")
    level, reasons = resume_guarantee(saved, run.manifest)
    info |= {"promise": level, "reasons": reasons, "restored": source[1]}
    run.screen.print(f"restored {source[0]} {done} of {source[1]}")
    run.screen.print(f"promise  {PROMISES[level]}" + (f" ({'; '.join(reasons)})" if reasons else ""))


def _report(run: Run) -> None:
    """Says what restoring came across."""
    for event in run.checkpoints.poll():
        run.screen.print(f"warning  {event}")


def _refuse(run: Run, step: int, saved: dict[str, Any]) -> list[str]:
    """What the config changed since a checkpoint. Raises ConfigError where the run cannot go on with it."""
    same_data = saved.get("data") == run.manifest.get("data")
    changes, refused = compare_configs(saved["config"], run.manifest["config"], step, same_data)
    if not same_data and not refused:
        refused = ["data: the documents or the tokenizer are not those the run began with; give them back"]
    if refused:
        raise ConfigError([Problem(str(run.dir), "", f"{line}; or train under a new name") for line in refused])
    return changes


def restored(checkpoints: Checkpointer, abstract: State, step: int) -> tuple[State, dict[str, Any]]:
    """(state, manifest) of a checkpoint, also where `guard` began or ceased to look for spikes since.

    Args:
        abstract: of the state that is wanted; a window that the checkpoint does not have is empty.
        step: as `Checkpointer.choose` found it: its files are not checked again.

    Raises:
        CheckpointError: it does not fit.
    """
    _, saved = read_manifest(checkpoints.directory, step)
    try:
        had = guards.guard(saved["config"].get("guard", ())).spikes is not None
    except ValueError as error:
        raise CheckpointError(f"the config of checkpoint {step} is not valid: guard: {error}") from None
    if had == ("spikes" in abstract):
        return checkpoints.restore(step, abstract, verify=False)
    others = {name: leaf for name, leaf in abstract.items() if name != "spikes"}
    state, manifest = checkpoints.restore(step, others, partial=True, verify=False)
    if "spikes" in abstract:
        placed = {name: leaf.sharding for name, leaf in abstract["spikes"].items()}
        state["spikes"] = jax.jit(empty_window, out_shardings=placed)()
    return state, manifest
