"""`jaxtrain islands status RUN_DIR`: prints how far the islands of a run are."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxtrain.exit_codes import OK
from jaxtrain.islands.status import read_status, status_table


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    print(status_table(read_status(Path(args.run))))
    return OK
