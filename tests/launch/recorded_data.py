"""Packed text that writes down which rows it gave, so that a test sees the token ids of all processes."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

import numpy as np

from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data.dataset import open_datasets


class Recorded:
    """A user's data class around `text`; FOLDER/PID gets a line `step row checksum` for every row of training."""

    def __init__(self, split, seed, global_batch, corpus, cache, sequence, folder, delay=0.0):
        data = DataConfig(
            sources=(SourceConfig(path=corpus),), sequence=sequence, global_batch=global_batch, cache_dir=cache,
            workers=1,
            validation_fraction=0.2,
        )  # fmt: skip
        train, validation = open_datasets(data, seed)
        self._data, self._folder = (train, Path(folder)) if split == "train" else (validation, None)
        self._delay = delay
        for name in ("vocab", "fingerprint", "batches", "unigram_entropy"):
            setattr(self, name, getattr(self._data, name))

    def batch(self, step, rows=None):
        found = self._data.batch(step, rows)
        if self._folder is not None:
            time.sleep(self._delay)
            places = np.arange(self._data.global_batch)[slice(None) if rows is None else rows]
            lines = [f"{step} {row} {zlib.crc32(ids.tobytes())}\n" for row, ids in zip(places, found["tokens"])]
            with open(self._folder / str(os.getpid()), "a") as file:
                file.write("".join(lines))
        return found


def recorded(folder: Path) -> dict[tuple[int, int], int]:
    """(step, row) -> checksum of the token ids. Fails where processes or generations gave different ones."""
    rows: dict[tuple[int, int], int] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a killed process leaves a broken one
                step, row, ids = map(int, line.split())
                assert rows.setdefault((step, row), ids) == ids, f"step {step} row {row} has other token ids"
    return rows
