"""`jaxtrain train CONFIG`: trains from a config."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import jaxtrain
from jaxtrain.cli.lost_output import drop_lost_output
from jaxtrain.cli.setup import config_overrides, load_config, prepare_jax_import
from jaxtrain.config import Config, ConfigError, Problem
from jaxtrain.errors import UserError
from jaxtrain.exit_codes import ERROR, OK, SAVED
from jaxtrain.trainer.continuation import Resume, is_scheduled


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    config, _ = load_config(args.config, config_overrides(args))
    is_new = args.resume == "never" or (args.resume is None and (sys.stdin.isatty() or not is_scheduled()))
    return train(config, None, args, resume=False if is_new else "auto")


def train(config: Config, directory: Path | None, args: argparse.Namespace, *, resume: Resume) -> int:
    """Trains a config, new or resumed, and returns the exit code."""
    if args.deadline is not None and not 0 <= args.deadline < float("inf"):
        raise UserError(f"--deadline: expected seconds, or 0 for none; found {args.deadline:g}")
    if args.owns_process:
        drop_lost_output()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # its default would end a run that has not begun to train
    prepare_jax_import(config.simulate or args.simulate)
    from jaxtrain.callbacks.samples import LossPlot, Samples
    from jaxtrain.errors import TrainingError
    from jaxtrain.trackers.console import ConsoleTracker
    from jaxtrain.trackers.goodput import GoodputLedger, process_age

    console, ledger = ConsoleTracker(config.steps), GoodputLedger(age=process_age() if args.owns_process else 0.0)
    console.watch(ledger)
    console.say("importing JAX")
    try:
        result = jaxtrain.train(
            config, run_dir=directory, resume=resume, profile=_step_range(args.profile), console=console, ledger=ledger,
            deadline=args.deadline, verbose=args.verbose, callbacks=[LossPlot(), Samples()],
        )  # fmt: skip
    except TrainingError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return ERROR
    finally:
        console.close()
    console.print(f"next  {result.resume_command}")
    return SAVED if result.stopped_by else OK


def _step_range(text: str | None) -> tuple[int, int] | None:
    """Parses START:STOP."""
    if text is None:
        return None
    try:
        start, stop = map(int, text.split(":"))
    except ValueError:
        start, stop = 0, 0
    if not 0 <= start < stop:
        raise ConfigError([Problem("command line", "--profile", f"expected START:STOP such as 10:13; found {text!r}")])
    return start, stop
