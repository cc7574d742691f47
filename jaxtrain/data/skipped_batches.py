"""Batch of a step when some batches are skipped: a pure function of the step and of the list of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BatchRanges = tuple[tuple[int, int], ...]  # ranges [first, end) of batches, ascending, apart from each other


def batch_index(step: int, skips: BatchRanges) -> int:
    """Index of the batch that step `step` (from 0) trains on: the `step`-th one that is not passed over."""
    index = step
    for first, end in skips:
        if index < first:
            break
        index += end - first
    return index


def merge_ranges(skips: Iterable[Sequence[int]], *more: tuple[int, int]) -> BatchRanges:
    """The ranges with more of them, in order and joined where they touch."""
    out: list[tuple[int, int]] = []
    for first, end in sorted((int(first), int(end)) for first, end in (*skips, *more)):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif first < end:
            out.append((first, end))
    return tuple(out)
