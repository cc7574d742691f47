"""A progress bar for commands that do one long thing."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class ProgressBar:
    """`progress(done, total)` as a bar with ETA on stderr; nothing is drawn where that is no terminal."""

    def __init__(self, title: str):
        from rich.console import Console

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(title, total=None)

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` units."""
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._progress.stop()
