"""The shipped pipeline schedules.

Each is an order of F and B for every stage. `timetable.build_table` assigns the ticks, and puts weight gradients where
a stage would wait. All work for every number of stages and microbatches; the figures in their docstrings hold for
microbatches >= stages (p stages, m microbatches, v chunks; F, B, W the cost of a whole stage).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxtrain.errors import ScheduleError, did_you_mean, join_words
from jaxtrain.pipeline.schedules.table import Action, Table, Task
from jaxtrain.pipeline.schedules.timetable import build_table


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Runs all forwards, then all backwards (Huang et al., arXiv 1811.06965).

    Bubble (p-1)(F+B+W), also in lockstep; m activations at every stage.
    """
    orders = [_one_chunk_order(microbatches, Action.BW, warmup=microbatches)] * stages
    return build_table(orders, name="gpipe", placement="loop", microbatches=microbatches, chunks=chunks)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Alternates one forward and one backward (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473).

    Bubble (p-1)(F+B+W); min(m, p-s) activations at stage s.
    """
    orders = [_one_chunk_order(microbatches, Action.BW, warmup=stages - 1 - stage) for stage in range(stages)]
    return build_table(orders, name="1f1b", placement="loop", microbatches=microbatches, chunks=chunks)


def aligned_one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """1F1B for lockstep: all stages do their forwards in the same ticks, and their backwards in the next ones.

    In plain 1F1B neighbours do F and BW in the same tick, which in lockstep costs a BW each time. Here the bubble is
    (p-1)(F+B+W) in lockstep too, as with GPipe, for min(m, 2(p-s) - 1) activations at stage s. It is the interleaved
    schedule of one chunk.
    """
    return interleaved_one_f_one_b(stages, microbatches, chunks, name="1f1b_aligned")


def interleaved_one_f_one_b(
    stages: int, microbatches: int, chunks: int = 2, *, name: str = "interleaved_1f1b"
) -> Table:
    """1F1B over v chunks per stage, microbatches in rounds of p (Megatron-LM, arXiv 2104.04473, 2.2).

    The p microbatches of a round go through the first chunk of every stage, then through the second, and so on. For m a
    multiple of p: bubble (p-1)(F+B+W)/v, also in lockstep, as all stages do F, or BW, in the same ticks; activations
    min(m, (2(p-1-s) + (v-1)p + 1) / v), at most p + (p-1)/v, at stage s. For other m the last round is scheduled as if
    it were full, without the missing microbatches.
    """
    rounds = range(0, microbatches, stages)
    units = [(chunk, first + i) for first in rounds for chunk in range(chunks) for i in range(stages)]
    forwards = [Task(Action.F, microbatch, chunk) for chunk, microbatch in units]
    backwards = [Task(Action.BW, microbatch, chunks - 1 - chunk) for chunk, microbatch in units]
    orders = [
        [task for task in _alternate(forwards, backwards, warmup) if task.microbatch < microbatches]
        for warmup in (2 * (stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages))
    ]
    return build_table(orders, name=name, placement="loop", microbatches=microbatches, chunks=chunks, aligned=True)


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """1F1B with weight gradients deferred to where a stage would wait (Qi et al., arXiv 2401.10241, 2.2).

    3m + p - 1 ticks, which no schedule of one chunk can beat; bubble (p-1)(F+B-W), the paper's, where W <= F and
    W <= B, and (p-1) max(F+B-W, F, B) in general; p activations, held until W.
    """
    orders = [_one_chunk_order(microbatches, Action.B, warmup=stages - 1 - stage) for stage in range(stages)]
    return build_table(orders, name="zb_h1", placement="loop", microbatches=microbatches, chunks=chunks, limit=stages)


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Two chunks in a V, without a bubble for F = B = W (arXiv 2401.10241, 6, as a block of arXiv 2405.15362).

    6m + p - 1 ticks of half a stage, which nothing can beat: the last stage has to wait p - 1 of them. For
    m >= 2p - 1 no stage waits between its first action and its last one, which is the paper's zero bubble; to gain
    from that beyond lockstep, stages would have to update their weights without waiting for each other. p activations
    at most, held until W.
    """
    build = partial(build_table, name="zb_v", placement="v", microbatches=microbatches, chunks=chunks)
    return build(_v_orders(stages, microbatches, down=4, up=2), limit=2 * stages, eager=True)


def v_half(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Two chunks in a V with half the activations of 1F1B (Qi et al., arXiv 2405.15362, 3).

    floor((p+2)/2) activations at most, held until W; 6m + 3p - 3 ticks of half a stage, one less for odd p > 1.
    """
    build = partial(build_table, name="v_half", placement="v", microbatches=microbatches, chunks=chunks)
    return build(_v_orders(stages, microbatches, down=2, up=1), limit=2 * ((stages + 2) // 2))


@dataclass(frozen=True)
class Schedule:
    """A shipped schedule.

    Attributes:
        build: (stages, microbatches, chunks) -> table.
        chunks: allowed numbers of chunks, the default first; empty: any number, default 2.
        summary: one line for help texts.
    """

    build: Callable[[int, int, int], Table]
    chunks: tuple[int, ...]
    summary: str


SCHEDULES = {
    "gpipe": Schedule(gpipe, (1,), "all forwards, then all backwards"),
    "1f1b": Schedule(one_f_one_b, (1,), "one forward, one backward, alternating"),
    "1f1b_aligned": Schedule(aligned_one_f_one_b, (1,), "1F1B for lockstep: forwards together, backwards together"),
    "interleaved_1f1b": Schedule(interleaved_one_f_one_b, (), "1F1B over several chunks per stage"),
    "zb_h1": Schedule(zb_h1, (1,), "1F1B with deferred weight gradients"),
    "zb_v": Schedule(zb_v, (2,), "two chunks in a V, no bubble at equal costs"),
    "v_half": Schedule(v_half, (2,), "two chunks in a V, half the activations"),
}


def shipped_table(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Table:
    """Returns the table of a shipped schedule.

    Args:
        name: of `SCHEDULES`.
        stages: pipeline stages, at least 1.
        microbatches: of a step, at least 1.
        chunks: virtual stages per stage; default: what the schedule has, 2 for `interleaved_1f1b`.

    Raises:
        ScheduleError: unknown schedule, or one that does not support these numbers.
    """
    if name not in SCHEDULES:
        expected = f"; expected {join_words(SCHEDULES)}, or the path of a .csv or .yaml table"
        raise ScheduleError(f"schedule: no schedule `{name}`{did_you_mean(name, SCHEDULES) or expected}")
    allowed = SCHEDULES[name].chunks
    chunks = (allowed or (2,))[0] if chunks is None else chunks
    for label, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ScheduleError(f"schedule {name}: {label}: expected at least 1; found {number}")
    if allowed and chunks not in allowed:
        hint = "; interleaved_1f1b has any number of chunks" if allowed == (1,) else ""
        raise ScheduleError(f"schedule {name}: chunks: expected {join_words(allowed)}; found {chunks}{hint}")
    return SCHEDULES[name].build(stages, microbatches, chunks)


def _one_chunk_order(microbatches: int, backward: Action, warmup: int) -> list[Task]:
    """Returns the order of one stage with one chunk."""
    forwards, backwards = ([Task(action, i) for i in range(microbatches)] for action in (Action.F, backward))
    return _alternate(forwards, backwards, warmup)


def _alternate(forwards: Sequence[Task], backwards: Sequence[Task], warmup: int) -> list[Task]:
    """Returns `warmup` forwards, then forwards and backwards alternating (steady state), then the cool-down."""
    order = list(forwards[:warmup])
    for index, backward in enumerate(backwards):
        order += [*forwards[warmup + index : warmup + index + 1], backward]
    return order


def _v_orders(stages: int, microbatches: int, down: int, up: int) -> list[list[Task]]:
    """Returns the orders of a V: the ticks of one microbatch, repeated every 6 ticks (arXiv 2405.15362).

    6 ticks are a stage's work on a microbatch. A microbatch moves to the next virtual stage every `down` ticks in the
    forward pass of the first chunk and the backward pass of the second, and every `up` ticks in the other two passes.
    The time between F and B determines the memory: a stage holds up to (down + up) * 2p / 6 activations of chunks, so
    4 + 2 gives those of 1F1B and 2 + 1 half of them.
    """
    last_f = (down + up) * (stages - 1) + 1  # tick of the last F
    orders = []
    for stage in range(stages):
        ticks = {
            Task(Action.F, 0, 0): down * stage,
            Task(Action.F, 0, 1): last_f - up * stage,
            Task(Action.B, 0, 1): last_f + 1 + down * stage,
            Task(Action.B, 0, 0): last_f + 2 + down * (stages - 1) + up * (stages - 1 - stage),
        }
        timed = [
            (tick + 6 * i, task._replace(microbatch=i)) for task, tick in ticks.items() for i in range(microbatches)
        ]
        orders.append([task for _, task in sorted(timed)])
    return orders
