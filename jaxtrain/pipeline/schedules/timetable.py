"""Assignment of ticks to an order of actions on each stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxtrain.pipeline.schedules.table import Action, Placement, Table, Task, dependencies, unfuse, virtual_stages


def build_table(
    orders: Sequence[Sequence[Task]],
    *,
    name: str,
    placement: Placement,
    microbatches: int,
    chunks: int,
    limit: int | None = None,
    eager: bool = False,
    aligned: bool = False,
) -> Table:
    """Gives every action the first tick in which its stage is free and its inputs are available.

    A stage does its actions in the given order. While it waits for an input or for memory, it computes a pending weight
    gradient: W actions are added here and are not in the orders.

    Args:
        orders: F and B, or F and BW, of each stage.
        name: of the schedule.
        placement: `loop` or `v`.
        microbatches: of a step.
        chunks: virtual stages per stage.
        limit: chunk activations that a stage may hold, each from F to W (or BW); default: any number.
        eager: a stage that would wait may also take a later F of its first chunk, within the limit.
        aligned: all stages do the same kind of action in a tick, round robin; stages whose next action is another wait.

    Raises:
        ValueError: the orders deadlock, or the limit is too small for them.
    """
    virtual_stage = virtual_stages(placement, len(orders), chunks)
    done = np.zeros((4, virtual_stage.size, microbatches), bool)  # before this tick

    def is_ready(task: Task, stage: int) -> bool:
        required = dependencies(task.action, int(virtual_stage[stage, task.chunk]), virtual_stage.size - 1)
        return all(done[part, virtual, task.microbatch] for part, virtual in required)

    queues = [_StageQueue(order, len(order) if limit is None else limit, eager) for order in orders]
    rows: list[list[Task | None]] = [[] for _ in orders]
    tick, kind = 0, Action.IDLE
    while any(queue.order or queue.pending_weights for queue in queues):
        chosen = [queue.next(partial(is_ready, stage=stage)) for stage, queue in enumerate(queues)]
        if not any(chosen):
            stage = next(stage for stage, queue in enumerate(queues) if queue.order)
            raise ValueError(f"{name}: deadlock at tick {tick}: stage {stage} waits with {queues[stage].order[0]}")
        if aligned:
            last = kind  # the next kind in a round, of those that some stage is able to do
            kind = min({task.action for task in chosen if task}, key=lambda action: (action <= last, action))
            chosen = [task if task and task.action == kind else None for task in chosen]
        for stage, task in enumerate(chosen):
            rows[stage].append(task)
            if task:
                queues[stage].run(task)
                done[list(unfuse(task.action)), virtual_stage[stage, task.chunk], task.microbatch] = True
        tick += 1
    return Table.from_rows(rows, name=name, placement=placement, microbatches=microbatches, chunks=chunks)


class _StageQueue:
    """Pending actions of one stage: the rest of its order, and weight gradients; and the activations it holds."""

    def __init__(self, order: Sequence[Task], limit: int, eager: bool):
        self.order, self.pending_weights, self.in_flight = list(order), deque[Task](), 0
        self._limit, self._eager = limit, eager

    def next(self, is_ready: Callable[[Task], bool]) -> Task | None:
        """Returns the task that the stage can do in this tick, if any."""
        has_memory = self.in_flight < self._limit
        if self.order:
            task = self.order[0]
            if is_ready(task) and (has_memory or task.action != Action.F):
                return task
            if self._eager and has_memory:
                task = next((task for task in self.order if task.action == Action.F and task.chunk == 0), None)
                if task and is_ready(task):
                    return task
        return self.pending_weights[0] if self.pending_weights else None

    def run(self, task: Task) -> None:
        """Removes a task from the queue and counts its activations."""
        (self.pending_weights if task.action == Action.W else self.order).remove(task)
        self.in_flight += {Action.F: 1, Action.W: -1, Action.BW: -1}.get(task.action, 0)
        if task.action == Action.B:
            self.pending_weights.append(Task(Action.W, task.microbatch, task.chunk))
