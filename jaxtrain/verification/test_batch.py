"""Batches that tell layouts apart: packed documents, padding, and rows of very different weight."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

Batch = dict[str, np.ndarray]


def packed(step: int, rows: int, tokens: int, vocab: int) -> Batch:
    """Three documents a row of random lengths, of tokens few of which are frequent; the last row is mostly padding.

    Returns:
        tokens, targets, positions, segments int32 and weights float32, all [rows, tokens].
    """
    rng = np.random.default_rng(step)
    batch: Batch = {name: np.zeros((rows, tokens), np.int32) for name in ("tokens", "targets", "positions", "segments")}
    batch["weights"] = np.zeros((rows, tokens), np.float32)
    for row in range(rows):
        end = tokens if row < rows - 1 else max(6, tokens // 6)
        cuts = [0, *sorted(rng.choice(np.arange(1, end), size=2, replace=False)), end]
        for segment, (start, stop) in enumerate(itertools.pairwise(cuts), start=1):
            document = (vocab * rng.random(stop - start + 1) ** 4).astype(np.int32)
            batch["tokens"][row, start:stop], batch["targets"][row, start:stop] = document[:-1], document[1:]
            batch["positions"][row, start:stop] = np.arange(stop - start)
            batch["segments"][row, start:stop] = segment
            batch["weights"][row, start : stop - 1] = 1.0
    return batch


def kept_rows(batch: Mapping[str, np.ndarray], rows: np.ndarray) -> Batch:
    """The batch with the weights of all other rows 0."""
    weights = np.zeros_like(batch["weights"])
    weights[rows] = batch["weights"][rows]
    return {**batch, "weights": weights}


def merged_documents(batch: Mapping[str, np.ndarray]) -> Batch:
    """The batch with each row one document, as attention sees it that ignores segments."""
    return {**batch, "segments": (batch["segments"] > 0).astype(np.int32)}
