"""Public functions of the package, which the commands use, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxtrain.callbacks.base import Callback
from jaxtrain.callbacks.default import default_callbacks
from jaxtrain.config import Config
from jaxtrain.core.resolve import with_layout
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.trainer import loop
from jaxtrain.trainer.loop import Result


def train(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: bool = False,
    profile: tuple[int, int] | None = None,
    console: ConsoleTracker | None = None,
    ledger: GoodputLedger | None = None,
    deadline: float | None = None,
    verbose: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Trains to `config.steps` and returns when the last checkpoint is on disk.

    Args:
        config: from `jaxtrain.load`, or a `Config` built in Python, whose layout is then applied and checked.
        run_dir: run directory; default: a new one, DIR/NAME.
        resume: resume from the newest good checkpoint in `run_dir`.
        profile: (start, stop) of the steps to trace for XProf into RUN_DIR/profile.
        console: shows progress; default: on the terminal.
        ledger: time accounting of this process; default: a new one.
        deadline: seconds that a step or its data may hang before the process is ended; None: from measured step times;
            0: never.
        verbose: print the layout of every parameter when the run begins.
        callbacks: called after the default ones.

    Returns:
        the outcome, with metrics, state and compiled program.

    Raises:
        UserError: bad input, one line for each problem.
        NotSavedError: the last checkpoint could not be written.
        DivergedError: too many steps in a row made no update, because loss or gradients are bad.
        CorruptionError: a device computes wrong results (`guard.replica_check_every`).
    """
    config = with_layout(config)
    default = default_callbacks(config, profile=profile, deadline=deadline, verbose=verbose)
    return loop.train(config, run_dir, resume=resume, console=console, ledger=ledger, callbacks=[*default, *callbacks])
