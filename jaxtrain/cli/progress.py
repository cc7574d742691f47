"""Spinner and progress bar on stderr for long commands. Nothing is drawn if stderr is not a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def spinner(title: str) -> Progress:
    """Returns a context manager that shows the title and the elapsed time."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = _progress(*columns)
    progress.add_task(title, total=None)
    return progress


def _progress(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class ProgressBar:
    """Progress bar with ETA, updated by calling it."""

    def __init__(self, title: str):
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = _progress(*columns)
        self._task = self._progress.add_task(title, total=None)

    def __call__(self, done: int, total: int) -> None:
        """Shows that `done` of `total` units are done."""
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._progress.stop()
