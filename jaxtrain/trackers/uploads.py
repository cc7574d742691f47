"""Trackers on other people's formats: TensorBoard, Weights & Biases, MLflow. Each imports its package when made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError


class UploadQueue:
    """Hands folders on in a thread of its own, one after the other: the loop does not wait for a server."""

    def __init__(self) -> None:
        self._pool, self._sent = ThreadPoolExecutor(1), []

    def add(self, send: Callable[[Path], Any], folder: Path) -> None:
        """`send(folder)`, unless the folder is deleted before its turn or meanwhile."""
        self._sent.append(self._pool.submit(self._try, send, folder))

    def close(self) -> None:
        """Waits for all; raises what the first that failed raised."""
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


def import_package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"jaxtrain[{extra}]" if extra else "jaxtrain"
        raise UserError(f"log.{extra or 'tensorboard'} needs {error.name or module}: pip install '{hint}'") from None


def read_run_id(path: Path) -> str | None:
    """The id of the run to join, or None."""
    return path.read_text().strip() or None if path.exists() else None


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
