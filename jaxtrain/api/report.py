"""The history of a run from Python. Does not import JAX."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from pathlib import Path

from jaxtrain.islands.report.history import IslandsHistory, read_islands
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


def islands_report(run: str | Path) -> IslandsHistory:
    """Returns the history of a run of islands: of each island, and of what they pushed, read and waited for.

    Args:
        run: folder of the run, which may be training.

    Returns:
        `status`, as `jaxtrain islands status` shows it; `runs`, by island as of `report`; `staleness()`, counts of
        updates between the read and the push of an island; `waits()`, seconds by (who waited, for whom).

    Raises:
        UserError: the folder is not a run of islands.
    """
    return read_islands(Path(run))
