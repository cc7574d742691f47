"""Spinner and progress bar on stderr for long commands. Nothing is drawn if stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as columns
from rich.progress import Progress, ProgressColumn

from jaxtrain.io.terminal import plain_console


def spinner(title: str) -> Progress:
    """Returns a context manager that shows the title and the elapsed time."""
    text = columns.TextColumn("{task.description}", markup=False)
    progress = _progress(columns.SpinnerColumn(), text, columns.TimeElapsedColumn())
    progress.add_task(title, total=None)
    return progress


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar with ETA; yields a function of (units done, total units) that updates it."""
    text = columns.TextColumn("{task.description}")
    eta = columns.TimeRemainingColumn()
    with _progress(text, columns.BarColumn(), columns.TaskProgressColumn(), eta) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _progress(*columns: ProgressColumn) -> Progress:
    console = plain_console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
