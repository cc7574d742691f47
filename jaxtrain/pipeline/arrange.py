"""From an order of actions on each stage to a table of ticks. NumPy only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxtrain.pipeline.table import Action, Placement, Step, Table, from_rows, needs, parts, virtual_stages

NEVER = np.iinfo(np.int32).max


def place(
    orders: Sequence[Sequence[Step]],
    *,
    name: str,
    placement: Placement,
    microbatches: int,
    chunks: int,
    limit: int | None = None,
    eager: bool = False,
) -> Table:
    """Gives every action the first tick at which its stage is free and its inputs are there.

    A stage does its actions in the order given. While it cannot go on, for want of an input or of room, it computes a
    weight gradient that is open: those of `B` are added here, and not in the orders.

    Args:
        orders: F and B, or F and BW, of each stage.
        limit: chunk activations that a stage may keep, each from F to W (or BW); default: any number.
        eager: a stage that would wait may also take a later F of its first chunk, where that leaves room for another F.

    Raises:
        ValueError: the orders wait for each other, or the limit is too small for them.
    """
    virtual = virtual_stages(placement, len(orders), chunks)
    done = np.full((4, virtual.size, microbatches), NEVER, np.int64)

    def is_ready(step: Step, stage: int, tick: int) -> bool:
        required = needs(step.action, int(virtual[stage, step.chunk]), virtual.size - 1)
        return all(done[kind, at, step.microbatch] < tick for kind, at in required)

    workers = [_Worker(order, NEVER if limit is None else limit, eager) for order in orders]
    rows: list[list[Step | None]] = [[] for _ in orders]
    tick = 0
    while any(worker.order or worker.open for worker in workers):
        chosen = [worker.choose(partial(is_ready, stage=stage, tick=tick)) for stage, worker in enumerate(workers)]
        if not any(chosen):
            waiting = next(s for s, worker in enumerate(workers) if worker.order)
            raise ValueError(f"{name}: stage {waiting} waits for ever at tick {tick} with {workers[waiting].order[0]}")
        for stage, step in enumerate(chosen):
            rows[stage].append(step)
            if step:
                done[list(parts(step.action)), virtual[stage, step.chunk], step.microbatch] = tick
        tick += 1
    return from_rows(rows, name=name, placement=placement, microbatches=microbatches, chunks=chunks)


class _Worker:
    """One stage at work: what is left of its order, its open weight gradients, and the activations it keeps."""

    def __init__(self, order: Sequence[Step], limit: int, eager: bool):
        self.order, self.open, self.kept = list(order), deque[Step](), 0
        self._limit, self._eager = limit, eager

    def choose(self, is_ready: Callable[[Step], bool]) -> Step | None:
        """Takes what to do in this tick, if anything."""
        step = self._next(is_ready)
        if step is not None:
            self.order.remove(step)
        elif self.open:
            step = self.open.popleft()
        else:
            return None
        self.kept += {Action.F: 1, Action.W: -1, Action.BW: -1}.get(step.action, 0)
        if step.action == Action.B:
            self.open.append(Step(Action.W, step.microbatch, step.chunk))
        return step

    def _next(self, is_ready: Callable[[Step], bool]) -> Step | None:
        if not self.order:
            return None
        step = self.order[0]
        if is_ready(step) and (step.action != Action.F or self.kept < self._limit):
            return step
        if self._eager and self.kept < self._limit - 1:
            step = next((step for step in self.order if step.action == Action.F and step.chunk == 0), None)
            return step if step and is_ready(step) else None
        return None
