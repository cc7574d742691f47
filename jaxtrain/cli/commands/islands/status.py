"""`jaxtrain islands status|report RUN_DIR`: prints how far the islands of a run are, and writes a page on them."""

from __future__ import annotations

import argparse
from pathlib import Path

import jaxtrain
from jaxtrain.cli.output import check_output_files, write_file
from jaxtrain.errors import UserError
from jaxtrain.exit_codes import OK
from jaxtrain.islands.report.page import islands_page
from jaxtrain.islands.status import read_status, status_table


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: the folder is no run of islands, or the page cannot be written.
    """
    if args.html and args.action == "status":
        raise UserError("islands: --html is for `jaxtrain islands report`; expected no such option, or report")
    directory = Path(args.run)
    if args.action == "status":
        print(status_table(read_status(directory)))
        return OK
    history = jaxtrain.islands_report(directory)
    print(status_table(history.status))
    file = args.html or str(directory / "islands.html")
    check_output_files(file)
    write_file(file, islands_page(history))
    return OK
