"""The history of a run from Python. Does not import JAX."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from pathlib import Path

from jaxtrain.reports import loss_plot as loss_plot  # shows the history in notebooks
from jaxtrain.reports import page as page
from jaxtrain.reports.history import RunHistory, read_history


def report(run: str | Path) -> RunHistory:
    """Returns the history of a run: time accounting, restarts, curves and checkpoints.

    Args:
        run: folder of the run, which may be training.

    Raises:
        UserError: the folder is not a run.
    """
    return read_history(Path(run))
