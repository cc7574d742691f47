"""Buffers of a pipeline: what each stage sends, and the slots it writes and reads, computed from a schedule's table.

A tick of the executor, on each stage:

1. reads the slots in `read`, computes the table's action, writes the slots in `write`;
2. sends the result to the next stage, to the previous one or to itself, as `send` says: one permutation of all stages
   in each direction, unconditionally;
3. writes what it receives from the previous stage, the next stage and itself into the slots of `Receives`.

So a result of tick t can be read in tick t + 1, and a slot that is read in tick t is free for what is received in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush

import numpy as np

from jaxtrain.pipeline.schedules.table import Action, Table

NO_SLOT = -1


class Destination(IntEnum):
    """Destination of a stage's result: the next stage (stage 0 after the last), the previous one, or itself."""

    NONE = 0
    NEXT = 1
    PREVIOUS = 2
    SELF = 3


class Payload(IntEnum):
    """Content of a received message: nothing, the input activation of an F, or the output gradient for a B."""

    NONE = 0
    ACTIVATION = 1
    GRADIENT = 2


@dataclass(frozen=True, eq=False)
class Receives:
    """Messages that each stage receives from one side at the end of each tick. All int32 [ticks, stages].

    Attributes:
        payload: `Payload`.
        slot: slot to write in the buffer of that payload; -1 for none.
        microbatch: microbatch of the message; 0 for none.
        chunk: chunk of the receiving stage that will read it; 0 for none.
    """

    payload: np.ndarray
    slot: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray


@dataclass(frozen=True, eq=False)
class ReceiveBuffer:
    """Slots that received messages are written to and an action reads. Attributes as in `SlotBuffer`."""

    slots: int
    read: np.ndarray


@dataclass(frozen=True, eq=False)
class SlotBuffer(ReceiveBuffer):
    """Slots that an action of a stage writes and a later one reads.

    The array has `slots + 1` entries: index -1, for none, is a spare entry that may be read and written without effect.

    Attributes:
        slots: the most slots that any stage uses at once.
        read: int32 [ticks, stages], the slot that the action of the tick reads; -1 for none.
        write: int32 [ticks, stages], the slot that the action of the tick writes; -1 for none.
    """

    write: np.ndarray


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers of a table.

    Attributes:
        send: int32 [ticks, stages] of `Destination`.
        from_previous: receives from the previous stage (it sent to `NEXT`).
        from_next: receives from the next stage (it sent to `PREVIOUS`).
        from_self: what a stage hands to another of its chunks (it sent to `SELF`).
        loss_gradient: int32 [ticks, stages], the slot of `gradients` for the loss gradient of the output that F of the
            last virtual stage computes in this tick; -1 for none.
        activations: inputs waiting for their F. -1 at virtual stage 0, which reads the embedded batch.
        gradients: output gradients waiting for their B or BW.
        residuals_until_b: residuals of F that B or BW is the last to read.
        residuals_until_w: residuals of F that W or BW is the last to read: the same write, a later read.
        b_to_w: values that B saves for W. No slots if the backward pass is not split.
    """

    send: np.ndarray
    from_previous: Receives
    from_next: Receives
    from_self: Receives
    loss_gradient: np.ndarray
    activations: ReceiveBuffer
    gradients: ReceiveBuffer
    residuals_until_b: SlotBuffer
    residuals_until_w: SlotBuffer
    b_to_w: SlotBuffer


def allocate_buffers(table: Table) -> Buffers:
    """Returns the buffers of a table that `check_table` accepts, each with as few slots as its busiest stage needs."""
    last = table.virtual_stage.size - 1
    activations = _allocate(table, ((Action.F, i - 1, Action.F, i) for i in range(1, last + 1)))
    sent = [(Action.B, i + 1, Action.B, i) for i in range(last)]
    gradients = _allocate(table, [*sent, (Action.F, last, Action.B, last)])

    def within_stage(writer: Action, reader: Action) -> SlotBuffer:
        return _allocate(table, ((writer, i, reader, i) for i in range(last + 1)))

    send = np.zeros(table.action.shape, np.int32)
    receives = {
        destination: Receives(*(np.full(table.action.shape, value, np.int32) for value in (0, NO_SLOT, 0, 0)))
        for destination in (Destination.NEXT, Destination.PREVIOUS, Destination.SELF)
    }
    for tick, stage, (action, microbatch, chunk) in table.tasks():
        step = {Action.F: 1, Action.B: -1, Action.BW: -1}.get(action, 0)
        target = int(table.virtual_stage[stage, chunk]) + step
        if step and 0 <= target <= last:
            to, to_chunk = table.location[target].tolist()
            destination = send[tick, stage] = _destination(table, stage, to, step)
            payload, buffer = (Payload.ACTIVATION, activations) if step > 0 else (Payload.GRADIENT, gradients)
            side = receives[destination]
            side.payload[tick, to], side.slot[tick, to] = payload, buffer.write[tick, stage]
            side.microbatch[tick, to], side.chunk[tick, to] = microbatch, to_chunk
    return Buffers(
        send,
        from_previous=receives[Destination.NEXT],
        from_next=receives[Destination.PREVIOUS],
        from_self=receives[Destination.SELF],
        loss_gradient=np.where(table.action == Action.F, gradients.write, NO_SLOT),
        activations=ReceiveBuffer(activations.slots, activations.read),
        gradients=ReceiveBuffer(gradients.slots, gradients.read),
        residuals_until_b=within_stage(Action.F, Action.B),
        residuals_until_w=within_stage(Action.F, Action.W),
        b_to_w=within_stage(Action.B, Action.W),
    )


def _destination(table: Table, stage: int, to: int, step: int) -> Destination:
    """A loop goes forward by `NEXT` and back by `PREVIOUS`, also between last and first stage; a V never wraps."""
    if stage == to:
        return Destination.SELF
    is_next = step > 0 if table.placement == "loop" else to == stage + 1
    return Destination.NEXT if is_next else Destination.PREVIOUS


def _allocate(table: Table, pairs: Iterable[tuple[Action, int, Action, int]]) -> SlotBuffer:
    """Allocates slots on the reader's stage for values of (writer, virtual stage) read by (reader, virtual stage).

    A value needs no slot if writer and reader are one action (BW).
    """
    live_ranges: list[list[tuple[int, int, int]]] = [[] for _ in range(table.stages)]  # write tick, read tick, writer
    for writer, source, reader, target in pairs:
        writer_stage, reader_stage = table.location[source, 0], table.location[target, 0]
        ticks = zip(table.tick_of[writer, source].tolist(), table.tick_of[reader, target].tolist())
        live_ranges[reader_stage] += [(start, end, writer_stage) for start, end in ticks if start < end]
    write, read = (np.full(table.action.shape, NO_SLOT, np.int32) for _ in range(2))
    slots = 0
    for stage, ranges in enumerate(live_ranges):
        used, free, occupied = 0, [], []  # number of slots, heap of slots, heap of (tick of the read, slot)
        for start, end, writer_stage in sorted(ranges):
            while occupied and occupied[0][0] <= start:
                heappush(free, heappop(occupied)[1])
            if not free:
                heappush(free, used)
                used += 1
            slot = heappop(free)
            heappush(occupied, (end, slot))
            write[start, writer_stage], read[end, stage] = slot, slot
        slots = max(slots, used)
    return SlotBuffer(slots, read, write)
