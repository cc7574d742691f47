"""Mixture of sources: maps a global row to a source and one of its rows, as a pure function.

Weights become integer counts m_k per period of M rows. The j-th row of source k in a period has a position from
floor(j M / m_k) up to, and excluding, ceil((j + 1) M / m_k). Earliest-deadline-first scheduling satisfies all of
these, so that in every prefix each source is less than one row away from its share.
Source: Baruah, Cohen, Plaxton and Varvel, Proportionate Progress, Algorithmica 15 (1996), one resource.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from jaxtrain.errors import DataError

PERIOD = 10_000  # rows; shares with a larger common denominator are rounded to 1e-4


def integer_weights(weights: Sequence[float], period: int = PERIOD) -> np.ndarray:
    """Returns the rows of each source per period, int64[K], with no common divisor.

    They are exact if they can sum to at most `period`; otherwise they are rounded by largest remainder to a sum of
    `period`, with at least one row for a positive weight.

    Raises:
      DataError: a negative weight, or no positive one.
    """
    if not len(weights) or min(weights) < 0 or not sum(weights) > 0:
        raise DataError(f"mixture weights {list(weights)}: each must be 0 or more, and at least one positive")
    exact = [Fraction(str(float(w))) for w in weights]  # from decimal text, so that 0.1 is one tenth
    scale = math.lcm(*(w.denominator for w in exact))
    counts = [int(w * scale) for w in exact]
    divisor = math.gcd(*counts)
    counts = [c // divisor for c in counts]
    if sum(counts) <= period:
        return np.array(counts, np.int64)
    total = sum(exact)
    shares = [w / total * period for w in exact]
    counts = [max(int(s), 1) if s > 0 else 0 for s in shares]
    by_remainder = sorted(range(len(counts)), key=lambda k: (int(shares[k]) - shares[k], k))
    for k in by_remainder[: max(period - sum(counts), 0)]:
        counts[k] += 1
    return np.array(counts, np.int64) // math.gcd(*counts)


def interleave(counts: np.ndarray) -> np.ndarray:
    """Returns the source of each row of a period, int32[sum(counts)], by earliest deadline first."""
    period, sizes = int(counts.sum()), counts.tolist()
    released: list[tuple[int, int]] = []  # heap of (deadline, source)
    releases: list[list[int]] = [[] for _ in range(period + 1)]  # sources whose next row is released at each position
    releases[0] = [k for k, size in enumerate(sizes) if size]
    placed = [0] * len(sizes)
    out = np.empty(period, np.int32)
    for t in range(period):
        for k in releases[t]:
            heapq.heappush(released, (-(-(placed[k] + 1) * period // sizes[k]), k))
        _, k = heapq.heappop(released)
        out[t] = k
        placed[k] += 1
        if placed[k] < sizes[k]:
            releases[max(placed[k] * period // sizes[k], t + 1)].append(k)
    return out


class _WeightRange:
    """A range of rows with constant weights.

    Args:
      start: first row.
      counts: int64[K], rows of each source per period.
      base: int64[K], rows of each source before `start`.
    """

    def __init__(self, start: int, counts: np.ndarray, base: np.ndarray) -> None:
        self.start, self.counts, self.base = start, counts, base
        self.table = interleave(counts)
        self.rank = np.empty(len(self.table), np.int64)  # earlier rows of the same source in the period
        for k in range(len(counts)):
            positions = np.flatnonzero(self.table == k)
            self.rank[positions] = np.arange(positions.size)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        period, position = np.divmod(rows - self.start, len(self.table))
        source = self.table[position].astype(np.int64)
        return source, self.base[source] + period * self.counts[source] + self.rank[position]

    def totals(self, end: int) -> np.ndarray:
        """Returns the rows of each source before row `end`, int64[K]."""
        period, position = divmod(end - self.start, len(self.table))
        return self.base + period * self.counts + np.bincount(self.table[:position], minlength=len(self.counts))


class Mixture:
    """Maps global rows to sources and their rows.

    Args:
      ranges: (first row, weights[K]), sorted; the first has row 0.

    Raises:
      DataError: bad weights.
    """

    def __init__(self, ranges: Sequence[tuple[int, Sequence[float]]]) -> None:
        self.ranges: list[_WeightRange] = []
        for start, weights in ranges:
            counts = integer_weights(weights)
            base = self.ranges[-1].totals(start) if self.ranges else np.zeros(len(counts), np.int64)
            self.ranges.append(_WeightRange(start, counts, base))
        self.starts = np.array([s.start for s in self.ranges], np.int64)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source int64[R], row of that source int64[R]) of global rows int64[R]."""
        rows = np.asarray(rows, np.int64)
        if len(self.ranges) == 1:
            return self.ranges[0].locate(rows)
        source, local = np.empty_like(rows), np.empty_like(rows)
        index = np.searchsorted(self.starts, rows, side="right") - 1
        for i in np.unique(index):
            mask = index == i
            source[mask], local[mask] = self.ranges[i].locate(rows[mask])
        return source, local


def weight_ranges(schedules: Sequence[Mapping[int, float]], global_batch: int) -> list[tuple[int, list[float]]]:
    """Returns the ranges of a `Mixture` whose weights change at given steps.

    Args:
      schedules: step -> weight of each source from that step on; each has step 0.
      global_batch: rows per step.
    """
    weights, ranges = [schedule[0] for schedule in schedules], []
    for step in sorted(set().union(*schedules)):
        weights = [schedule.get(step, weight) for schedule, weight in zip(schedules, weights)]
        ranges.append((step * global_batch, weights))
    return ranges
