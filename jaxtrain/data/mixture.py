"""Mixing sources: which source gives global row r, and which of its rows, as a pure function of r.

Weights become integer counts m_k per period of M rows. Within a period the j-th row of source k may stand no
earlier than floor(j M / m_k) and must stand before ceil((j + 1) M / m_k); serving the earliest deadline first
meets every window, so that at every prefix each source is less than one row away from its share.
Source: Baruah, Cohen, Plaxton and Varvel, Proportionate Progress, Algorithmica 15 (1996), one resource.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from jaxtrain.errors import DataError

PERIOD = 10_000  # rows: a share is kept exactly if it can be written with so small a denominator, else to 1e-4


def integer_weights(weights: Sequence[float], period: int = PERIOD) -> np.ndarray:
    """Rows of each source per period, int64[K], with no common divisor.

    Exact when the ratios of the weights allow a sum of at most `period`; otherwise rounded by largest remainder
    to a sum of `period`, a positive weight giving at least one row.

    Raises:
      DataError: a negative weight, or none positive.
    """
    if not len(weights) or min(weights) < 0 or not sum(weights) > 0:
        raise DataError(f"mixture weights {list(weights)}: each must be 0 or more and one at least positive")
    exact = [Fraction(str(float(w))) for w in weights]  # of the decimal text: 0.1 means one tenth
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
    """One period: the source of each row, int32[sum(counts)], earliest deadline first."""
    period = int(counts.sum())
    ready: list[tuple[int, int]] = []  # (deadline, source) of rows that may be placed
    later: list[list[int]] = [[] for _ in range(period + 1)]  # sources whose next row is released at that time
    placed = [0] * len(counts)
    sizes = counts.tolist()
    for k, size in enumerate(sizes):
        if size:
            later[0].append(k)
    out = np.empty(period, np.int32)
    for t in range(period):
        for k in later[t]:
            heapq.heappush(ready, (-(-(placed[k] + 1) * period // sizes[k]), k))
        _, k = heapq.heappop(ready)
        out[t] = k
        placed[k] += 1
        if placed[k] < sizes[k]:
            release = placed[k] * period // sizes[k]
            if release <= t:
                heapq.heappush(ready, (-(-(placed[k] + 1) * period // sizes[k]), k))
            else:
                later[release].append(k)
    return out


class _Segment:
    """A stretch of rows with constant weights."""

    def __init__(self, start: int, counts: np.ndarray, base: np.ndarray) -> None:
        self.start, self.counts, self.base = start, counts, base
        self.table = interleave(counts)
        self.rank = np.empty(len(self.table), np.int64)  # how many rows of the same source stand before, in the period
        for k in range(len(counts)):
            where = np.flatnonzero(self.table == k)
            self.rank[where] = np.arange(where.size)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        period, place = np.divmod(rows - self.start, len(self.table))
        source = self.table[place].astype(np.int64)
        return source, self.base[source] + period * self.counts[source] + self.rank[place]

    def totals(self, end: int) -> np.ndarray:
        """Rows of each source before row `end`."""
        period, place = divmod(end - self.start, len(self.table))
        return self.base + period * self.counts + np.bincount(self.table[:place], minlength=len(self.counts))


class Mixture:
    """Global row -> (source, row of that source).

    Args:
      segments: (first row, weights[K]) with increasing first rows, the first being 0.

    Raises:
      DataError: bad weights.
    """

    def __init__(self, segments: Sequence[tuple[int, Sequence[float]]]) -> None:
        self.segments: list[_Segment] = []
        for start, weights in segments:
            counts = integer_weights(weights)
            base = self.segments[-1].totals(start) if self.segments else np.zeros(len(counts), np.int64)
            self.segments.append(_Segment(start, counts, base))
        self.starts = np.array([s.start for s in self.segments], np.int64)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source int64[R], row of that source int64[R]) of global rows int64[R]; each source counts on from 0."""
        rows = np.asarray(rows, np.int64)
        if len(self.segments) == 1:
            return self.segments[0].locate(rows)
        source, local = np.empty_like(rows), np.empty_like(rows)
        which = np.searchsorted(self.starts, rows, side="right") - 1
        for i in np.unique(which):
            at = which == i
            source[at], local[at] = self.segments[i].locate(rows[at])
        return source, local


def weight_segments(shares: Sequence[Mapping[int, float]], global_batch: int) -> list[tuple[int, list[float]]]:
    """Segments in rows from weights that change at given steps; `shares[k]` maps steps, 0 among them, to source k's."""
    current, out = [one[0] for one in shares], []
    for step in sorted(set().union(*shares)):
        current = [one.get(step, weight) for one, weight in zip(shares, current)]
        out.append((step * global_batch, list(current)))
    return out
