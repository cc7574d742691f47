"""Mapping of steps to batches when some batches are skipped, as a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BatchRanges = tuple[tuple[int, int], ...]  # ranges [first, end) of batches, ascending and disjoint


def batch_index(step: int, skipped: BatchRanges) -> int:
    """Returns the index of the batch of a step: the `step`-th one (from 0) that is not skipped."""
    index = step
    for first, end in skipped:
        if index < first:
            break
        index += end - first
    return index


def merge_ranges(ranges: Iterable[Sequence[int]], *more: tuple[int, int]) -> BatchRanges:
    """Sorts ranges and joins those that overlap or touch."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted((int(first), int(end)) for first, end in (*ranges, *more)):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif first < end:
            merged.append((first, end))
    return tuple(merged)
