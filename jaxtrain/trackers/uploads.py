"""Helpers of trackers that send to a server: background uploads, ids of resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


class UploadQueue:
    """Uploads folders one by one in a thread of its own, so that the loop does not wait for a server."""

    def __init__(self) -> None:
        self._pool, self._sent = ThreadPoolExecutor(1), []

    def add(self, send: Callable[[Path], Any], folder: Path) -> None:
        """Schedules `send(folder)`, which is skipped if the folder is deleted before or meanwhile."""
        self._sent.append(self._pool.submit(self._try, send, folder))

    def close(self) -> None:
        """Waits for all uploads; raises the error of the first that failed."""
        self._pool.shutdown()
        for sent in self._sent:
            sent.result()

    @staticmethod
    def _try(send: Callable[[Path], Any], folder: Path) -> None:
        try:
            if folder.exists():
                send(folder)
        except OSError:
            if folder.exists():
                raise


def read_run_id(path: Path) -> str | None:
    """Reads the id of the run to continue; None if there is none."""
    return path.read_text().strip() or None if path.exists() else None


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings to one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
