"""`jaxtrain.Trainer`: a training run from Python."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import optax

from jaxtrain.api.launched_script import end_if_stopped, launched_run
from jaxtrain.api.step_state import StepState
from jaxtrain.callbacks.base import Callback
from jaxtrain.callbacks.default import default_callbacks
from jaxtrain.config import Config
from jaxtrain.core.components import Components, with_objects
from jaxtrain.core.evaluation import validate
from jaxtrain.core.placement import placer
from jaxtrain.core.program import Program
from jaxtrain.core.resolve import ConfigSource, load_config, with_layout
from jaxtrain.core.state import evaluated_parameters, non_trainable
from jaxtrain.data.objects.iterables import separate
from jaxtrain.data.objects.open import RowsOf, as_dataset
from jaxtrain.errors import UserError
from jaxtrain.io.exit import close_at_exit
from jaxtrain.trackers.base import Tracker
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.trainer.continuation import Resume
from jaxtrain.trainer.data.open_objects import keep_place, open_eval_data
from jaxtrain.trainer.loop import Progress, validate_between_steps
from jaxtrain.trainer.metric_values import numbers
from jaxtrain.trainer.run_training import Result, result_of, run_steps
from jaxtrain.trainer.setup import new_run_directory, open_trainer
from jaxtrain.trainer.training_run import TrainingRun


@dataclass(frozen=True)
class Step:
    """A step that was dispatched.

    Attributes:
        number: finished steps.
    """

    number: int
    _on_device: Mapping[str, jax.Array]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the step; of one that is for each replica `NAME/INDEX`, where it is not 0.

        Reading them waits for the step, so read them now and then in a fast loop.
        """
        return numbers(self._on_device)


class Trainer:
    """A training run: its config, and Python objects in place of what the config names.

        trainer = jaxtrain.Trainer("quickstart", layout="fsdp", optimizer=optax.lamb(1e-3))
        result = trainer.fit()

    Nothing is built before the first use. A second `fit` continues where the first one ended.

    Args:
        config: path of a YAML file, name of a shipped config (`quickstart`, `recipes/spirals`), dict of sections, or
            `Config`; default: the default values.
        overrides: `key=value` texts.
        model: class of Flax modules, function of `rngs` that returns one, or module, whose values are the initial ones.
        weights: pytree of arrays, or a module: initial values of the variables of the same paths. Those of
            `model.weights` map them to others, and its `strict` tells if all must be there.
        optimizer: an optax transformation; its learning rate, decay and clipping are its own.
        loss: function `(model, batch) -> loss`, see docs/own-models.md.
        data: an object with `batch(step, rows)`; a {name: array}, `datasets.Dataset` or torch `Dataset` of all rows;
            or an iterable of batches, such as a loader, or a function that returns one.
        eval_data: validation data, likewise.
        rows: of the batches of iterables. "global": all rows of a step, the same on every process; "local": those of
            this process, see `jaxtrain.data_shard`.
        metrics: name -> function `(model, batch)` of validation, which returns a mean of the rows or (sum, weight).
        callbacks: called after the default ones, see `jaxtrain.Callback`.
        trackers: receive metrics and events, see `jaxtrain.Tracker`, beside those of `log`.
        run_dir: folder of the run; default: a new one, DIR/NAME.
        resume: resume from the newest good checkpoint in `run_dir`. "auto": do so if DIR/NAME holds the run of this
            config, so that the same call may be made again, as schedulers do; another config there is refused.
        profile: (start, stop) of the steps to trace for XProf into RUN_DIR/profile.
        console: shows progress; default: on the terminal.
        ledger: time accounting of this process; default: a new one.
        deadline: seconds that a step or its data may hang before the process is ended; None: from measured step times;
            0: never.
        verbose: print the layout of every parameter when the run begins.
        keys: sections or keys of the config, such as `layout="fsdp"`, `steps=100`, `mesh={"fsdp": 4}`; `model`,
            `optimizer`, `loss` and `data` may be such sections, too.

    Raises:
        UserError: a bad config or object, one line for each problem.
    """

    def __init__(
        self,
        config: ConfigSource = None,
        *overrides: str,
        model: Any = None,
        weights: Any = None,
        optimizer: optax.GradientTransformation | Mapping[str, Any] | None = None,
        loss: Callable[..., Any] | Mapping[str, Any] | str | None = None,
        data: Any = None,
        eval_data: Any = None,
        rows: RowsOf = "global",
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        callbacks: Sequence[Callback] = (),
        trackers: Sequence[Tracker] = (),
        run_dir: str | Path | None = None,
        resume: Resume = False,
        profile: tuple[int, int] | None = None,
        console: ConsoleTracker | None = None,
        ledger: GoodputLedger | None = None,
        deadline: float | None = None,
        verbose: bool = False,
        **keys: Any,
    ) -> None:
        given: dict[str, Any] = {"model": model, "optimizer": optimizer, "loss": loss, "data": data}
        sections = {name: value for name, value in given.items() if _is_section(value)}
        keys |= sections
        objects = {name: value for name, value in given.items() if name not in sections}
        self._components = Components(weights=weights, eval_data=eval_data, rows=rows, metrics=metrics, **objects)
        _check_exclusive(self._components, overrides, keys)
        self.config: Config = with_layout(with_objects(load_config(config, *overrides, **keys), self._components))
        self._components = keep_place(self._components, self.config.data.global_batch)
        self._callbacks, self._trackers = list(callbacks), list(trackers)
        self._resume: Resume = resume
        self._options: dict[str, Any] = {"profile": profile, "deadline": deadline, "verbose": verbose}
        self._console, self._ledger = console, ledger
        self._directory = None if run_dir is None else Path(run_dir)
        self._run: TrainingRun | None = None
        self._progress: Progress | None = None
        self._is_new = False  # opened, and no step was made since
        self._is_training = False
        self._is_between_steps = False  # the caller of `steps` has the turn
        self._forward: Callable[..., Any] | None = None
        self._inspect: Callable[..., Any] | None = None

    @property
    def run_dir(self) -> Path:
        """Folder of the run. Raises UserError before it has begun."""
        if self._directory is None:
            raise UserError("Trainer: the run has no folder before its first step; expected `fit` or `steps` before")
        return self._directory

    @property
    def step(self) -> int:
        """Finished steps."""
        return 0 if self._progress is None else self._progress.step

    @property
    def program(self) -> Program:
        """The compiled parts of the run."""
        return self._opened().program

    @property
    def state(self) -> Mapping[str, Any]:
        """The train state, a pytree of sharded arrays. The next step takes its memory: copy what is to be kept.

        Raises:
            UserError: when it is read after another step.
        """
        return StepState(self._state(), self.step, lambda: self.step)

    @property
    def model(self) -> Any:
        """The module with its present parameters, to be called as after `eval()`; merged anew each time.

        A user's module is of its own class; its parameters are those that validation uses.
        """
        state = self.program.agreed(self._state())
        return self.program.model_def.bind(evaluated_parameters(state), non_trainable(state), None, False)

    def fit(self) -> Result:
        """Trains to `config.steps` and returns when the last checkpoint is on disk.

        Ctrl-C, in a notebook too, saves and returns; another `fit` continues from there.

        Raises:
            UserError: bad input.
            NotSavedError: the last checkpoint could not be written.
            DivergedError: too many steps in a row made no update, because loss or gradients are bad.
            CorruptionError: a device computes wrong results (`guard.replica_check_every`).
        """
        for _ in self.steps():
            pass
        assert self._run is not None
        assert self._progress is not None
        return result_of(self._run, self._progress)

    def steps(self) -> Iterator[Step]:
        """Runs steps in a loop of your own: `for step in trainer.steps(): ...`. Leaving the loop saves the run.

        So does the end of the program, also by an exception.

        Between two steps `evaluate`, `save`, `predict`, `gradients`, `state` and `model` are those of that step.

        Raises:
            UserError: another such loop of this trainer is not at its end.
        """
        loop = self._loop()
        close_at_exit(loop)
        return loop

    def _loop(self) -> Generator[Step]:
        if self._is_training:
            raise UserError("steps: the trainer is in a loop of `steps` already; expected to leave it first")
        if not self._is_new:
            self._open()
        assert self._run is not None
        assert self._progress is not None
        self._is_training, self._is_new = True, False
        try:
            with closing(run_steps(self._run, self._progress)) as steps:  # a loop that is left saves at once
                for _ in steps:
                    self._is_between_steps = True
                    yield Step(self._progress.step, self._run.on_device)
                    self._is_between_steps = False
        finally:
            self._is_training = self._is_between_steps = False
            self._resume = True  # from now on
        end_if_stopped(self._progress.stopped_by)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Returns the metrics on the validation data, or on other data, as `eval/NAME`.

        Between two steps of `steps` it is a validation of the run: its time is not that of training, and metrics of
        the validation data are in metrics.jsonl, the report and `on_evaluate` of callbacks.

        Args:
            data: as `eval_data`; default: the validation sets of the run.

        Raises:
            UserError: there is none.
        """
        run, state = self._opened(), self._state()
        if data is None and not run.eval_sets:
            raise UserError("evaluate: the run has no validation data; expected `eval_data`, or data to evaluate on")
        if data is None and self._is_between_steps:
            assert self._progress is not None
            return validate_between_steps(run, self._progress)
        given = replace(self._components, eval_data=data)
        sets = run.eval_sets if data is None else {"eval/": open_eval_data(run.config, given, once=True)}
        if self._is_between_steps:
            jax.block_until_ready(run.on_device)  # the step must not count as validation
        agreed = run.program.agreed(state)
        with run.ledger.phase("eval") if self._is_between_steps else nullcontext():
            params, count = evaluated_parameters(agreed), self.config.eval.batches
            return validate(run.program, sets, params, count, non_trainable(agreed))

    def predict(self, inputs: Any) -> Any:
        """Returns what the model returns for inputs, on the devices, with the parameters of validation.

        Args:
            inputs: array of rows, or a tuple of arguments of the model's call.
        """
        arguments = cast("tuple[Any, ...]", inputs) if isinstance(inputs, tuple) else (inputs,)
        state = self.program.agreed(self._state())
        if self._forward is None:
            bind = self.program.model_def.bind

            def forward(params: Any, other: Any, *args: Any) -> Any:
                return bind(params, other, None, False)(*args)

            self._forward = cast("Callable[..., Any]", jax.jit(forward))
        return self._forward(evaluated_parameters(state), non_trainable(state), *map(np.asarray, arguments))

    def gradients(self, batch: Mapping[str, Any] | None = None) -> tuple[dict[str, float], Any]:
        """Returns the metrics and the gradients of a batch, before clipping, and changes nothing.

        Args:
            batch: {name: array} of `global_batch` rows; default: that of the next step.

        Returns:
            metrics, and a tree of arrays like the parameters; of replicas that differ with a leading replica dim.
        """
        run = self._opened()
        rows = run.config.data.global_batch
        source = run.mixed_batches(separate(run.data)) if batch is None else as_dataset([batch], rows, name="batch")
        placed = placer(source, run.program)(self.step if batch is None else 0)
        if self._inspect is None:

            def inspect(state: Any, batch: Any) -> Any:
                return run.program.step_with_gradients(state, batch)[1:]

            self._inspect = cast("Callable[..., Any]", jax.jit(inspect))
        metrics, gradients = self._inspect(self._state(), placed)
        return numbers(metrics), gradients

    def save(self) -> None:
        """Saves the present state, in the background, in a loop of `steps`; `fit` saves by itself.

        Raises:
            UserError: outside of such a loop, where the run is saved already.
        """
        if not self._is_training or self._run is None or self._progress is None:
            raise UserError("save: the run is not in a loop of `steps`; its last state is saved already")
        self._run.save(self._progress.state, self._progress.step, {}, is_last=False)

    def _state(self) -> dict[str, Any]:
        self._opened()
        assert self._progress is not None
        return dict(self._progress.state)

    def _opened(self) -> TrainingRun:
        if self._run is None:
            self._open()
            assert self._run is not None
        return self._run

    def _open(self) -> None:
        """Builds the run, or opens it again where it was saved."""
        self._run = self._progress = None  # frees the state before another one is restored
        if (launched := launched_run(self.config, self._directory)) is not None:
            (self.config, self._directory), self._resume = launched, True
        self._directory = self._directory or new_run_directory(self.config, self._resume)
        console, ledger = self._console or ConsoleTracker(self.config.steps), self._ledger or GoodputLedger()
        console.watch(ledger)
        console.say("starting the devices")
        try:
            run, state, step = open_trainer(
                self.config, self._directory, console=console, resume=self._resume, ledger=ledger,
                components=self._components, trackers=self._trackers,
                callbacks=[*default_callbacks(self.config, **self._options), *self._callbacks],
            )  # fmt: skip
        except BaseException:
            console.close()
            raise
        self._run, self._progress, self._is_new = run, Progress(state, step), True
        self.config = run.config  # with the steps of its epochs
        self._ledger = None  # the next one accounts for the next part
        self._forward = self._inspect = None


def _is_section(value: Any) -> bool:
    """Returns whether an argument is a section of the config, not an object: a text, or a dict without arrays."""
    if not isinstance(value, Mapping):
        return isinstance(value, str)
    return not any(hasattr(item, "shape") for item in cast("Mapping[Any, Any]", value).values())


def _check_exclusive(components: Components, overrides: Sequence[str], keys: Mapping[str, Any]) -> None:
    """Raises UserError if the caller gives both an object and the keys that it replaces."""
    given = [*(text.partition("=")[0].split(".")[0] for text in overrides), *keys]
    replaced = {"optimizer": ("optimizer", "schedule")}
    for name, sections in replaced.items():
        both = [section for section in sections if section in given]
        if getattr(components, name) is not None and both:
            raise UserError(f"{name}: an object and keys of `{both[0]}` are given; expected one of them")
