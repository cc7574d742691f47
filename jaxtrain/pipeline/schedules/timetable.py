"""Timetable of ticks from an order of actions on each stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxtrain.pipeline.schedules.table import Action, Placement, Step, Table, from_rows, needs, parts, virtual_stages


def place(
    orders: Sequence[Sequence[Step]],
    *,
    name: str,
    placement: Placement,
    microbatches: int,
    chunks: int,
    limit: int | None = None,
    eager: bool = False,
    aligned: bool = False,
) -> Table:
    """Gives every action the first tick at which its stage is free and its inputs are there.

    A stage does its actions in the order given. While it cannot go on, for want of an input or of room, it computes a
    weight gradient that is open: those of `B` are added here, and not in the orders.

    Args:
        orders: F and B, or F and BW, of each stage.
        limit: chunk activations that a stage may keep, each from F to W (or BW); default: any number.
        eager: a stage that would wait may also take a later F of its first chunk, within the limit.
        aligned: all stages do the same kind of action in a tick, in turn; whoever has another one next waits.

    Raises:
        ValueError: the orders wait for each other, or the limit is too small for them.
    """
    virtual = virtual_stages(placement, len(orders), chunks)
    done = np.zeros((4, virtual.size, microbatches), bool)  # before this tick

    def is_ready(step: Step, stage: int) -> bool:
        required = needs(step.action, int(virtual[stage, step.chunk]), virtual.size - 1)
        return all(done[kind, at, step.microbatch] for kind, at in required)

    workers = [_Worker(order, len(order) if limit is None else limit, eager) for order in orders]
    rows: list[list[Step | None]] = [[] for _ in orders]
    tick, kind = 0, Action.NOTHING
    while any(worker.order or worker.open for worker in workers):
        chosen = [worker.next(partial(is_ready, stage=stage)) for stage, worker in enumerate(workers)]
        if not any(chosen):
            waiting = next(s for s, worker in enumerate(workers) if worker.order)
            raise ValueError(f"{name}: stage {waiting} waits for ever at tick {tick} with {workers[waiting].order[0]}")
        if aligned:
            kind = _turn(kind, {step.action for step in chosen if step})
            chosen = [step if step and step.action == kind else None for step in chosen]
        for stage, step in enumerate(chosen):
            rows[stage].append(step)
            if step:
                workers[stage].take(step)
                done[list(parts(step.action)), virtual[stage, step.chunk], step.microbatch] = True
        tick += 1
    return from_rows(rows, name=name, placement=placement, microbatches=microbatches, chunks=chunks)


def _turn(last: Action, able: set[Action]) -> Action:
    """The next kind of action after `last`, round and round, of those that some stage is able to do."""
    return min(able, key=lambda action: (action <= last, action))


class _Worker:
    """One stage at work: what is left of its order, its open weight gradients, and the activations it keeps."""

    def __init__(self, order: Sequence[Step], limit: int, eager: bool):
        self.order, self.open, self.kept = list(order), deque[Step](), 0
        self._limit, self._eager = limit, eager

    def next(self, is_ready: Callable[[Step], bool]) -> Step | None:
        """Returns the action that it can do in this tick, if any."""
        has_room = self.kept < self._limit
        if self.order:
            step = self.order[0]
            if is_ready(step) and (has_room or step.action != Action.F):
                return step
            if self._eager and has_room:
                step = next((step for step in self.order if step.action == Action.F and step.chunk == 0), None)
                if step and is_ready(step):
                    return step
        return self.open[0] if self.open else None

    def take(self, step: Step) -> None:
        """Does it."""
        if step.action == Action.W:
            self.open.remove(step)
        else:
            self.order.remove(step)
        self.kept += {Action.F: 1, Action.W: -1, Action.BW: -1}.get(step.action, 0)
        if step.action == Action.B:
            self.open.append(Step(Action.W, step.microbatch, step.chunk))
