"""Base of all callbacks: objects that watch a run, or act on it between steps."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config.schema import Config
from jaxtrain.core.program import Program, State
from jaxtrain.io.ticker import Ticker
from jaxtrain.trackers.base import TrackerList
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.trackers.meter import Meter

Fetch = Callable[[int], Any]  # batch index -> device batch
StepFn = Callable[[State, Any], tuple[State, Any]]


class TrainerView(Protocol):
    """The parts of a `jaxtrain.trainer.training_run.TrainingRun` that callbacks use."""

    config: Config
    dir: Path
    program: Program
    data: Any
    eval_sets: dict[str, Any]
    checkpointer: Checkpointer
    trackers: TrackerList
    console: ConsoleTracker
    ledger: GoodputLedger
    meter: Meter
    ticker: Ticker
    manifest: dict[str, Any]
    callbacks: CallbackList
    latest_metrics: dict[str, float]
    state: State  # after the last step; the next one donates it
    on_device: dict[str, jax.Array]  # metrics of the step that was dispatched last

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch that is trained on in a step, from 0; the first one if there are several."""
        ...

    def add_metrics(self, values: Mapping[str, float | jax.Array]) -> None:
        """Adds numbers, or scalars on the device, to the next record that is logged: in `on_step_end` to the step's.

        An array must not be part of the state, which the next step donates: copy it.
        """
        ...

    def current_metrics(self) -> dict[str, float]:
        """Returns the metrics of the step that was dispatched last. Waits for it, so the devices idle meanwhile."""
        ...

    def request_save(self, reason: str = "") -> None:
        """Asks for a checkpoint after this step; with several processes a few steps later, see `request_stop`."""
        ...

    def request_evaluate(self, reason: str = "") -> None:
        """Asks for a validation after this step."""
        ...

    def request_stop(self, reason: str) -> None:
        """Asks to save and end the run after this step.

        With several processes, one that asks is enough; all act after the same step, a few seconds later.
        """
        ...

    def request_rewind(self, steps: int, skip_batches: int = 0, reason: str = "") -> None:
        """Asks to go back to the newest checkpoint at least `steps` steps before, and to skip the batches after it."""
        ...

    def request_call(self, name: str) -> None:
        """Asks for `Callback.on_call` with this name on all processes after this step, which may then communicate."""
        ...

    def checkpoint_before(self, step: int, steps: int) -> int | None:
        """Returns the newest checkpoint at least `steps` before a step, else the oldest one before it; None without."""
        ...

    def return_to(self, state: State, target: int, skipped: tuple[int, int] | None) -> tuple[State, int]:
        """Restores a checkpoint in place of the state, and skips a range of batches from now on."""
        ...

    def last_good_checkpoint(self) -> str:
        """Describes the newest checkpoint, for an error message."""
        ...


@dataclass(frozen=True)
class StateSource:
    """State outside of the checkpoints that a run can resume from.

    Attributes:
        step: number of finished steps.
        manifest: manifest as in a checkpoint.
        name: name for the log, such as `the memory of the nodes`.
        load: abstract state -> state in its shardings, or None if it cannot be read.
    """

    step: int
    manifest: dict[str, Any]
    name: str
    load: Callable[[State], State | None]


class Callback:
    """Watches a run, or acts on it between steps. Every method does nothing unless a subclass overrides it.

    The training thread of every process calls the methods, for each callback in the order of the list. `step` counts
    finished optimizer steps. A method that raises ends the run. A callback that communicates must do so on all
    processes alike; decisions follow from global metrics, which are equal everywhere.

    Attributes:
        watched: metrics that `on_metrics` gets after every step, also after steps that are not logged.
    """

    watched: tuple[str, ...] = ()

    def program_config(self, config: Config, run_dir: Path) -> Config:
        """Returns the config that the program is built from."""
        return config

    def setup(self, trainer: TrainerView) -> None:
        """Called once the program is built, before a state exists."""

    def find_state(self, trainer: TrainerView, newer_than: int) -> StateSource | None:
        """Returns a state later than step `newer_than` to resume from, if there is one."""
        return None

    def on_train_begin(self, trainer: TrainerView, step: int) -> None:
        """Called with the state at hand, before the first step."""

    def wrap_fetch(self, fetch: Fetch) -> Fetch:
        """Returns the function that makes device batches; it runs in the prefetching thread."""
        return fetch

    def on_step_begin(self, trainer: TrainerView, step: int) -> None:
        """Called before the batch of the next step is taken."""

    def run_step(self, trainer: TrainerView, step_fn: StepFn, state: State, batch: Any, step: int) -> Any | None:
        """Runs the step after `step` in place of the trainer: (state, metrics). None leaves it to the others."""
        return None

    def on_step_dispatched(self, trainer: TrainerView, step: int) -> None:
        """Called when the step after `step` runs on the devices and the one before it is logged."""

    def replace_state(self, trainer: TrainerView, state: State, step: int) -> State:
        """Called when step `step` is dispatched; returns the state to continue with."""
        return state

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Called when a step is dispatched.

        `trainer.latest_metrics` has those of the step before; `trainer.current_metrics()` waits for those of this one.
        """

    def on_evaluate(self, trainer: TrainerView, step: int, scores: Mapping[str, float]) -> None:
        """Called after a validation, with its metrics, such as `eval/loss`."""

    def on_call(self, trainer: TrainerView, step: int, name: str) -> None:
        """Called on all processes after the same step, when one has asked by `trainer.request_call(name)`.

        So it may run collective functions, such as a jitted one of `trainer.state`.
        """

    def on_save(self, trainer: TrainerView, step: int) -> None:
        """Called when the checkpoint of a step is on the disk, which is some steps later."""

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Called before a run ends with an error, on the process that raised it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the callback's own state, of JSON values. Checkpoints hold that of process 0."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint, before `on_train_begin` or after a rewind."""

    def on_metrics(self, trainer: TrainerView, step: int, values: Mapping[str, float]) -> None:
        """Called with the metrics of every step: all of a logged step, else those in `watched`."""

    def on_log(self, trainer: TrainerView, step: int) -> None:
        """Called after a step's record went to the trackers."""

    def on_evaluate_begin(self, trainer: TrainerView, step: int) -> None:
        """Called before validation."""

    def is_healthy(self) -> bool:
        """Returns False while steps go wrong; no state is kept meanwhile."""
        return True

    def allows_save(self, trainer: TrainerView, state: State, step: int, is_last: bool) -> bool:
        """Returns False for a state that is not to be saved. Later callbacks are not asked then.

        Args:
            trainer: the run.
            state: train state.
            step: finished steps.
            is_last: the run ends here, so the alternative is to lose the steps since the last checkpoint.
        """
        return True

    def after_save(self, trainer: TrainerView, state: State, step: int) -> None:
        """Called at the end of each iteration, when a checkpoint that was due has begun."""

    def rewind(self, trainer: TrainerView, state: State, step: int) -> tuple[State, int] | None:
        """Returns (state, step) of an earlier step to continue from, or None to go forward."""
        return None

    def on_rewind(self, trainer: TrainerView, step: int) -> None:
        """Called when states after `step` are not to be used any more; -1 discards all that were not verified."""

    def on_train_end(self, trainer: TrainerView) -> None:
        """Called after the last step, before the last checkpoint is on disk. Not called after an error."""

    def close(self, trainer: TrainerView) -> None:
        """Called at the end, after errors too."""

    def on_finish(self, trainer: TrainerView, state: State, stopped_by: str | None) -> None:
        """Called after a run that ended without an error was saved and closed."""


class CallbackList:
    """Callbacks, called in order. Hooks are given as methods of `Callback`: `each(Callback.on_log, trainer, step)`."""

    def __init__(self, members: Sequence[Callback] = ()) -> None:
        self.members = list(members)
        self.watched = tuple(dict.fromkeys(name for member in self.members for name in member.watched))

    def each(self, hook: Callable[..., Any], *args: Any) -> None:
        """Calls a hook of every callback."""
        for member in self.members:
            getattr(member, hook.__name__)(*args)

    def first(self, hook: Callable[..., Any], *args: Any) -> Any | None:
        """Returns what the first callback returns that does not return None; later ones are not called."""
        for member in self.members:
            result = getattr(member, hook.__name__)(*args)
            if result is not None:
                return result
        return None

    def program_config(self, config: Config, run_dir: Path) -> Config:
        """Returns the config that the program is built from, as every callback leaves it."""
        for member in self.members:
            config = member.program_config(config, run_dir)
        return config

    def wrap_fetch(self, fetch: Fetch) -> Fetch:
        """Returns the function that makes device batches, wrapped by every callback."""
        for member in self.members:
            fetch = member.wrap_fetch(fetch)
        return fetch

    def replace_state(self, trainer: TrainerView, state: State, step: int) -> State:
        """Returns the state to continue with, as every callback leaves it."""
        for member in self.members:
            state = member.replace_state(trainer, state, step)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all callbacks that have one, by name of their class, numbered from the second on."""
        states = {name: member.state_dict() for name, member in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Gives the callbacks their states of a checkpoint; one that it does not have keeps what it has."""
        for name, member in self._named():
            if name in states:
                member.load_state_dict(states[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        counts: Counter[str] = Counter()
        for member in self.members:
            name = type(member).__qualname__
            counts[name] += 1
            yield name if counts[name] == 1 else f"{name}-{counts[name]}", member

    def is_healthy(self) -> bool:
        """Returns whether no callback objects to keeping states."""
        return all(member.is_healthy() for member in self.members)

    def allows_save(self, trainer: TrainerView, state: State, step: int, is_last: bool) -> bool:
        """Returns whether the state may be saved; the first callback that objects ends the question."""
        return all(member.allows_save(trainer, state, step, is_last) for member in self.members)
