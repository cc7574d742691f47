"""`jaxtrain launch local|node|islands CONFIG`: trains in several processes and restarts when some are lost."""

from __future__ import annotations

import argparse

from jaxtrain.exit_codes import SAVED
from jaxtrain.launch.islands.options import parse_islands
from jaxtrain.launch.islands.run import launch_islands
from jaxtrain.launch.options import parse_options, resume_command
from jaxtrain.launch.supervisor import supervise
from jaxtrain.launch.worker_logs import Terminal


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code of the first failed worker, 75 if all saved after a signal."""
    if args.where == "islands":
        return _islands(args)
    options, terminal = parse_options(args), Terminal()
    try:
        code, directory = supervise(options, terminal)
        if code == SAVED and directory is not None:
            terminal.show(f"next  {resume_command(options, directory)}")
        return code
    finally:
        terminal.close()


def _islands(args: argparse.Namespace) -> int:
    """Runs `launch islands`."""
    options, terminal = parse_islands(args), Terminal()
    try:
        return launch_islands(options, terminal)
    finally:
        terminal.close()
