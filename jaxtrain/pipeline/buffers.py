"""Buffers of a pipeline: what each stage sends, and the slots that it writes and reads, from a schedule's table.

A tick of the executor, on each stage:

1. read the slots of `reads`, compute the table's action, write the slots of `writes`;
2. send the result to the next stage, to the previous one, or keep it, as `send` says: all stages in one permutation
   each way, unconditionally;
3. write what came from the previous stage, the next stage and this one into the slots of `arrivals`.

So what is made in tick t can be read in tick t + 1, and a slot that is read in tick t is free for what arrives in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush

import numpy as np

from jaxtrain.pipeline.schedules.table import Action, Table

NONE = -1


class Way(IntEnum):
    """Destination of a stage's result: the next stage (stage 0 after the last), the previous one, or itself."""

    NOWHERE = 0
    NEXT = 1
    PREVIOUS = 2
    HERE = 3


class Kind(IntEnum):
    """Kind of what arrives: nothing, the input of a chunk's F, or the gradient of its output, for B."""

    NOTHING = 0
    ACTIVATION = 1
    GRADIENT = 2


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Arrivals at each stage at the end of each tick from one side. All int32 [ticks, stages].

    Args:
        kind: `Kind`.
        slot: of the buffer of that kind to write; -1 for none.
        microbatch: whose it is; 0 for none.
        chunk: of the receiving stage that will read it; 0 for none.
    """

    kind: np.ndarray
    slot: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray


@dataclass(frozen=True, eq=False)
class SlotBuffer:
    """Slots that an action of a stage writes and a later one reads.

    Slot -1 is none: with `slots + 1` entries in the array it is the spare last one, which may be read and written
    for nothing.

    Args:
        slots: number of slots, the most that any stage has in use at once.
        write: int32 [ticks, stages], the slot that the action of this tick writes; -1 for none.
        read: int32 [ticks, stages], the slot that the action of this tick reads; -1 for none.
    """

    slots: int
    write: np.ndarray
    read: np.ndarray


@dataclass(frozen=True, eq=False)
class Inbox:
    """Slots that arrivals write and an action reads. `slots`, `read`: as in `SlotBuffer`."""

    slots: int
    read: np.ndarray


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers of a table.

    Args:
        send: int32 [ticks, stages] of `Way`.
        from_previous: what came from the previous stage (it sent `NEXT`).
        from_next: what came from the next stage (it sent `PREVIOUS`).
        from_here: what a stage made for another of its own chunks (it sent `HERE`).
        activations: inputs waiting for their F. -1 at virtual stage 0, which reads the batch.
        from_loss: int32 [ticks, stages], the slot of `gradients` for what the loss says of the output that F of the
            last virtual stage makes in this tick; -1 for none.
        gradients: of outputs waiting for their B or BW.
        until_backward: what F keeps for B or BW.
        until_weight: what F keeps for W or BW: the same write, read by the last action that could need it.
        backward_to_weight: what B keeps for W. No slots where nothing is split.
    """

    send: np.ndarray
    from_previous: Arrivals
    from_next: Arrivals
    from_here: Arrivals
    from_loss: np.ndarray
    activations: Inbox
    gradients: Inbox
    until_backward: SlotBuffer
    until_weight: SlotBuffer
    backward_to_weight: SlotBuffer


def buffers(table: Table) -> Buffers:
    """The buffers of a table, which must have passed `check`; each has as few slots as its busiest stage needs."""
    last = table.virtual.size - 1
    activations = _ring(table, ((Action.F, at - 1, Action.F, at) for at in range(1, last + 1)))
    passed = [(Action.B, at + 1, Action.B, at) for at in range(last)]
    gradients = _ring(table, [*passed, (Action.F, last, Action.B, last)])
    send = np.zeros(table.action.shape, np.int32)
    sides = {way: Arrivals(*_empty(table, 0, NONE, 0, 0)) for way in (Way.NEXT, Way.PREVIOUS, Way.HERE)}
    for tick, stage, (action, microbatch, chunk) in table.steps():
        step = {Action.F: 1, Action.B: -1, Action.BW: -1}.get(action, 0)
        target = int(table.virtual[stage, chunk]) + step
        if step and 0 <= target < table.virtual.size:
            to, to_chunk = table.home[target].tolist()
            way = _way(table, stage, to, step)
            kind, slots = (Kind.ACTIVATION, activations) if step > 0 else (Kind.GRADIENT, gradients)
            send[tick, stage] = way
            side = sides[way]
            side.kind[tick, to], side.slot[tick, to] = kind, slots.write[tick, stage]
            side.microbatch[tick, to], side.chunk[tick, to] = microbatch, to_chunk
    return Buffers(
        send,
        from_previous=sides[Way.NEXT],
        from_next=sides[Way.PREVIOUS],
        from_here=sides[Way.HERE],
        from_loss=np.where(table.action == Action.F, gradients.write, NONE),
        activations=Inbox(activations.slots, activations.read),
        gradients=Inbox(gradients.slots, gradients.read),
        until_backward=_kept(table, Action.F, Action.B),
        until_weight=_kept(table, Action.F, Action.W),
        backward_to_weight=_kept(table, Action.B, Action.W),
    )


def _way(table: Table, stage: int, to: int, step: int) -> Way:
    """A loop goes forward by `NEXT` and back by `PREVIOUS`, round the ends too; a V never goes round."""
    if stage == to:
        return Way.HERE
    is_next = step > 0 if table.placement == "loop" else to == stage + 1
    return Way.NEXT if is_next else Way.PREVIOUS


def _kept(table: Table, writer: Action, reader: Action) -> SlotBuffer:
    """Slots for what one action leaves to another of the same virtual stage."""
    return _ring(table, ((writer, at, reader, at) for at in range(table.virtual.size)))


def _ring(table: Table, pairs: Iterable[tuple[Action, int, Action, int]]) -> SlotBuffer:
    """Slots for what (writer, virtual stage) leaves to (reader, virtual stage), on the reader's stage.

    Nothing is kept where both are one action (BW).
    """
    lives: list[list[tuple[int, int, int]]] = [[] for _ in range(table.stages)]
    for writer, source, reader, target in pairs:
        if 0 <= source < table.virtual.size:
            spans = zip(table.when[writer, source].tolist(), table.when[reader, target].tolist())
            lives[table.home[target, 0]] += [(begin, end, table.home[source, 0]) for begin, end in spans if begin < end]
    write, read = _empty(table, NONE, NONE)
    slots = 0
    for stage, spans in enumerate(lives):
        free: list[int] = []
        used = 0
        ends: list[tuple[int, int]] = []  # (tick of the read, slot) of what is kept
        for begin, end, source in sorted(spans):
            while ends and ends[0][0] <= begin:
                heappush(free, heappop(ends)[1])
            if not free:
                heappush(free, used)
                used += 1
            slot = heappop(free)
            heappush(ends, (end, slot))
            write[begin, source], read[end, stage] = slot, slot
        slots = max(slots, used)
    return SlotBuffer(slots, write, read)


def _empty(table: Table, *values: int) -> list[np.ndarray]:
    """An int32 [ticks, stages] full of each value."""
    return [np.full(table.action.shape, value, np.int32) for value in values]
