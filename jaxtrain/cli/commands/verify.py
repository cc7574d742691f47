"""`jaxtrain verify CONFIG`: compares every layout with one device."""

from __future__ import annotations

import argparse
import sys

import jaxtrain
from jaxtrain.cli.setup import prepare_jax_import
from jaxtrain.exit_codes import ERROR, OK


def run(args: argparse.Namespace) -> int:
    """Runs the command; exit code 1 if a layout differs from one device."""
    prepare_jax_import(args.simulate or 1)  # never on real devices
    from jaxtrain.cli.progress import progress_bar
    from jaxtrain.io.terminal import plain_console
    from jaxtrain.verification.report import WIDEST, details, summary_lines, table

    names = [name.strip() for name in args.layouts.split(",") if name.strip()]
    options = {"layouts": names, "devices": args.simulate, "steps": args.steps, "inject": args.inject}
    with progress_bar("verifying") as progress:
        outcome = jaxtrain.verify(args.config, *args.overrides, **options, progress=progress)
    width = None if sys.stdout.isatty() else 2 * WIDEST  # a file or pipe has no width
    console = plain_console(width=width)
    console.print("shrunk to compile fast, in float32:", *(f"  {change}" for change in outcome.changes), sep="\n")
    console.print(table(outcome, console.width))
    for line in details(outcome, console.width) + summary_lines(outcome):
        console.print(line, markup=False, soft_wrap=True)
    return OK if outcome.is_equal else ERROR
