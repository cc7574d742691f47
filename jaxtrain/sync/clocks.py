"""Clocks of workers that share a parameter server: who pushes and who reads at each update, in virtual time.

A worker reads the server's parameters, computes an iteration and pushes its gradients, again and again. Its clock is
the number of the iteration that it computes, from 0, as it is when the worker reads. It may begin iteration c if c is
at most `bound` ahead of the number that the slowest worker has completed (Ho et al. 2013, "More effective distributed
ML via a stale synchronous parallel parameter server"). Pushes that no read separates are one update.

Nothing here measures time: durations are given, and all is a pure function of them, the same on every process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

BLOCK = 1024  # updates that are computed and kept together
KEPT = 4  # blocks, for steps that are prepared ahead and those that a run goes back to
DRAWS = 256  # durations of a worker that are drawn together

Durations = Callable[[int, int], float]  # (worker, iteration) -> virtual time that it takes


class ServerUpdate(NamedTuple):
    """One update of the server.

    Attributes:
        clocks: iteration whose gradients each worker pushes; -1: it pushes nothing.
        staleness: updates between the read of each that pushes and this one; 0 for the others.
        reads: True for each that reads the parameters after the update, and begins its next iteration.
        completed: iterations that all workers together have completed.
        time: virtual time of the update.
    """

    clocks: tuple[int, ...]
    staleness: tuple[int, ...]
    reads: tuple[bool, ...]
    completed: int
    time: float

    @property
    def pushes(self) -> tuple[bool, ...]:
        """True for each worker whose gradients are part of the update."""
        return tuple(clock >= 0 for clock in self.clocks)


@dataclass
class _Workers:
    """Workers between two updates.

    Attributes:
        completed: iterations that each has completed.
        ends: virtual time at which it completes the next one; None: it waits for slower ones.
        read_at: number of updates before its last read.
        updates: number of updates of the server.
    """

    completed: list[int]
    ends: list[float | None]
    read_at: list[int]
    updates: int = 0

    def copy(self) -> _Workers:
        """Returns workers that move on their own."""
        return replace(self, completed=[*self.completed], ends=[*self.ends], read_at=[*self.read_at])


class Clocks:
    """The updates of a server, by number. Safe to be used by several threads.

    Args:
        workers: their number.
        bound: iterations that a worker may be ahead of the slowest; None: any number.
        durations: of the iterations, positive.
    """

    def __init__(self, workers: int, bound: int | None, durations: Durations) -> None:
        self._bound, self._durations = bound, durations
        begin = _Workers([0] * workers, [durations(worker, 0) for worker in range(workers)], [0] * workers)
        self._begins = [begin]  # of each block
        self._blocks: dict[int, list[ServerUpdate]] = {}
        self._lock = threading.Lock()

    def update(self, number: int) -> ServerUpdate:
        """Returns an update, from 0. The first call computes all before it: 100,000 take about a second."""
        block, place = divmod(number, BLOCK)
        with self._lock:
            for earlier in range(len(self._begins) - 1, block):
                self._compute(earlier)
            if block not in self._blocks:
                self._compute(block)
            return self._blocks[block][place]

    def _compute(self, block: int) -> None:
        workers = self._begins[block].copy()
        self._blocks[block] = [self._advance(workers) for _ in range(BLOCK)]
        for old in list(self._blocks)[:-KEPT]:
            del self._blocks[old]
        if len(self._begins) == block + 1:
            self._begins.append(workers)

    def _advance(self, workers: _Workers) -> ServerUpdate:
        """Moves the workers to the next read, and returns the update before it."""
        completed, ends, read_at = workers.completed, workers.ends, workers.read_at
        everyone = range(len(completed))
        clocks, staleness = [-1] * len(completed), [0] * len(completed)
        while True:
            now = min(end for end in ends if end is not None)
            for worker in everyone:
                if ends[worker] == now:
                    clocks[worker], staleness[worker] = completed[worker], workers.updates - read_at[worker]
                    completed[worker] += 1
                    ends[worker] = None
            first = None if self._bound is None else min(completed) + self._bound
            readers = [w for w in everyone if ends[w] is None and (first is None or completed[w] <= first)]
            if readers:
                break
        workers.updates += 1
        for worker in readers:
            ends[worker] = now + self._durations(worker, completed[worker])
            read_at[worker] = workers.updates
        reads = tuple(worker in readers for worker in everyone)
        return ServerUpdate(tuple(clocks), tuple(staleness), reads, sum(completed), now)


def random_durations(speeds: Sequence[float], jitter: float, seed: int) -> Durations:
    """Returns durations (1 + jitter u) / speed, with u drawn from [0, 1) for each worker and iteration.

    A pure function of the seed, the worker and the iteration: no logarithm or the like, which machines may round in
    different ways.
    """

    @lru_cache(maxsize=4 * len(speeds))
    def draws(worker: int, block: int) -> list[float]:
        return np.random.default_rng((seed, worker, block)).random(DRAWS).tolist()

    def duration(worker: int, iteration: int) -> float:
        block, place = divmod(iteration, DRAWS)
        return (1.0 + jitter * draws(worker, block)[place]) / speeds[worker]

    return duration
