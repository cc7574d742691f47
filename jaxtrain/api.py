"""Public functions of the package, which the commands use, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax

from jaxtrain.callbacks.base import Callback
from jaxtrain.callbacks.default import default_callbacks
from jaxtrain.config import Config
from jaxtrain.core.components import Components, with_model_type, with_optimizer_object
from jaxtrain.core.resolve import with_layout
from jaxtrain.distributed import runtime
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.trainer import loop
from jaxtrain.trainer.continuation import Resume
from jaxtrain.trainer.loop import Result


def initialize(simulate: int | None = None) -> None:
    """Starts JAX on the devices of a run, for scripts that create arrays or modules before `train`.

    `train` does it, too, if nothing has used JAX before. With several processes it joins them, as the environment
    says: JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and JAX_PROCESS_ID, which `jaxtrain launch` sets.

    Args:
        simulate: number of simulated CPU devices, over all processes; None: the devices of the machine.

    Raises:
        UserError: JAX runs already with other devices, or the environment is incomplete.
    """
    runtime.start(simulate)


def train(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: Resume = False,
    profile: tuple[int, int] | None = None,
    console: ConsoleTracker | None = None,
    ledger: GoodputLedger | None = None,
    deadline: float | None = None,
    verbose: bool = False,
    callbacks: Sequence[Callback] = (),
    model: Any = None,
    weights: Any = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Result:
    """Trains to `config.steps` and returns when the last checkpoint is on disk.

    Args:
        config: from `jaxtrain.load`, or a `Config` built in Python, whose layout is then applied and checked.
        run_dir: run directory; default: a new one, DIR/NAME.
        resume: resume from the newest good checkpoint in `run_dir`. "auto": do so if DIR/NAME holds the run of this
            config, so that the same call may be made again, as schedulers do; another config there is refused.
        profile: (start, stop) of the steps to trace for XProf into RUN_DIR/profile.
        console: shows progress; default: on the terminal.
        ledger: time accounting of this process; default: a new one.
        deadline: seconds that a step or its data may hang before the process is ended; None: from measured step times;
            0: never.
        verbose: print the layout of every parameter when the run begins.
        callbacks: called after the default ones.
        model: class of Flax modules, function that returns one, or module, in place of `config.model.type`, which
            becomes its name. The values of an NNX module are the initial ones, and it is not changed.
        weights: pytree of arrays, or a module: initial values of the variables of the same paths. Those of
            `config.model.weights` map them to others, and its `strict` tells if all must be there.
        optimizer: an optax transformation. Learning rate, schedule, decay and clipping are its own, and those of the
            config have no effect.

    Returns:
        the outcome, with metrics, state and compiled program.

    Raises:
        UserError: bad input, one line for each problem.
        NotSavedError: the last checkpoint could not be written.
        DivergedError: too many steps in a row made no update, because loss or gradients are bad.
        CorruptionError: a device computes wrong results (`guard.replica_check_every`).
    """
    if model is not None:
        config = with_model_type(config, model)
    if optimizer is not None:
        config = with_optimizer_object(config, optimizer)
    config = with_layout(config)
    default = default_callbacks(config, profile=profile, deadline=deadline, verbose=verbose)
    return loop.train(
        config, run_dir, resume=resume, console=console, ledger=ledger, callbacks=[*default, *callbacks],
        components=Components(model, weights, optimizer),
    )  # fmt: skip
