"""Batches that distinguish layouts: packed documents, padding, and rows of very different weight."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


def packed_batch(step: int, rows: int, tokens: int, vocab: int) -> Batch:
    """Returns a batch of three documents a row, of random lengths and mostly frequent tokens.

    The last row is mostly padding.

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


def weight_rows(batch: Mapping[str, np.ndarray], rows: np.ndarray) -> Batch:
    """Sets the weights of all rows but these to 0."""
    weights = np.zeros_like(batch["weights"])
    weights[rows] = batch["weights"][rows]
    return {**batch, "weights": weights}


def weight_tokens(batch: Mapping[str, np.ndarray], tokens: np.ndarray) -> Batch:
    """Sets the weights of all tokens of a row but these to 0."""
    weights = np.zeros_like(batch["weights"])
    weights[:, tokens] = batch["weights"][:, tokens]
    return {**batch, "weights": weights}


def repeat_rows(batch: Mapping[str, np.ndarray], rows: np.ndarray) -> Batch:
    """Returns a batch of as many rows, which are copies of these in turn."""
    return {name: values[np.resize(rows, len(values))] for name, values in batch.items()}


def without_document_boundaries(batch: Mapping[str, np.ndarray]) -> Batch:
    """Makes each row one document, as attention that ignores segments sees it."""
    return {**batch, "segments": (batch["segments"] > 0).astype(np.int32)}


class RecordedBatches:
    """Dataset of batches in memory, which repeat.

    Args:
        batches: batch of each step.
    """

    def __init__(self, batches: Sequence[Batch]):
        self._batches = batches

    def batch(self, step: int, rows: Any) -> Batch:
        """Returns rows of a step's batch."""
        return {name: value[rows] for name, value in self._batches[step % len(self._batches)].items()}
