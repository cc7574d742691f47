"""The shipped pipeline schedules.

Each is an order of F and B for every stage, written down below; `arrange.place` finds the ticks and puts weight
gradients where a stage would wait. All work for every number of stages and microbatches; the figures in their
docstrings hold for microbatches >= stages (p stages, m microbatches, v chunks; F, B, W the cost of a whole stage).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtrain.errors import ScheduleError, did_you_mean, join_words
from jaxtrain.pipeline.schedules.table import Action, Step, Table
from jaxtrain.pipeline.schedules.timetable import place


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Runs all forwards, then all backwards (Huang et al., arXiv 1811.06965).

    Bubble (p-1)(F+B+W), also in lockstep; m activations at every stage.
    """
    forwards, backwards = _in_turn(microbatches, Action.BW)
    orders = [_alternate(forwards, backwards, microbatches) for _ in range(stages)]
    return place(orders, name="gpipe", placement="loop", microbatches=microbatches, chunks=chunks)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """One forward, one backward in turn (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473).

    Bubble (p-1)(F+B+W); min(m, p-s) activations at stage s.
    """
    forwards, backwards = _in_turn(microbatches, Action.BW)
    orders = [_alternate(forwards, backwards, stages - 1 - stage) for stage in range(stages)]
    return place(orders, name="1f1b", placement="loop", microbatches=microbatches, chunks=chunks)


def aligned_one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """1F1B for lockstep: all stages do their forwards in the same ticks, and their backwards in the next ones.

    In plain 1F1B neighbours do F and BW in the same tick, which in lockstep costs a BW each time. Here the bubble is
    (p-1)(F+B+W) in lockstep too, as with GPipe, for min(m, 2(p-s) - 1) activations at stage s. It is the interleaved
    schedule of one chunk.
    """
    return _in_rounds("1f1b_aligned", stages, microbatches, chunks)


def interleaved_one_f_one_b(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B over v chunks a stage, microbatches in rounds of p (Megatron-LM, arXiv 2104.04473, 2.2).

    For m a multiple of p: bubble (p-1)(F+B+W)/v, also in lockstep, as all stages do F, or BW, in the same ticks;
    activations min(m, (2(p-1-s) + (v-1)p + 1) / v), at most p + (p-1)/v, at stage s. For other m the last round is
    filled up in thought and what is not there left out.
    """
    return _in_rounds("interleaved_1f1b", stages, microbatches, chunks)


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """1F1B with weight gradients put off to where a stage would wait (Qi et al., arXiv 2401.10241, 2.2).

    3m + p - 1 ticks, which no schedule of one chunk can beat; bubble (p-1)(F+B-W), the paper's, where W <= F and
    W <= B, and (p-1) max(F+B-W, F, B) in general; p activations, kept until W.
    """
    forwards, backwards = _in_turn(microbatches, Action.B)
    orders = [_alternate(forwards, backwards, stages - 1 - stage) for stage in range(stages)]
    return place(orders, name="zb_h1", placement="loop", microbatches=microbatches, chunks=chunks, limit=stages)


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Two chunks in a V, without a bubble for F = B = W (arXiv 2401.10241, 6, as a block of arXiv 2405.15362).

    6m + p - 1 ticks of half a stage, which nothing can beat: the last stage has to wait p - 1 of them. For
    m >= 2p - 1 no stage waits between its first action and its last one, which is the paper's zero bubble; to gain
    from that beyond lockstep, stages would have to update their weights without waiting for each other. p activations
    at most, kept until W.
    """
    orders = _v_orders(stages, microbatches, down=4, up=2)
    limit = 2 * stages
    return place(orders, name="zb_v", placement="v", microbatches=microbatches, chunks=chunks, limit=limit, eager=True)


def v_half(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Two chunks in a V with half the activations of 1F1B (Qi et al., arXiv 2405.15362, 3).

    floor((p+2)/2) activations at most, kept until W; 6m + 3p - 3 ticks of half a stage, one less for odd p > 1.
    """
    orders = _v_orders(stages, microbatches, down=2, up=1)
    limit = 2 * ((stages + 2) // 2)
    return place(orders, name="v_half", placement="v", microbatches=microbatches, chunks=chunks, limit=limit)


@dataclass(frozen=True)
class Schedule:
    """A way to make tables. `chunks`: the numbers of chunks it can have, its default first; empty for any (2)."""

    make: Callable[[int, int, int], Table]
    chunks: tuple[int, ...]
    summary: str


SCHEDULES = {
    "gpipe": Schedule(gpipe, (1,), "all forwards, then all backwards"),
    "1f1b": Schedule(one_f_one_b, (1,), "one forward, one backward in turn"),
    "1f1b_aligned": Schedule(aligned_one_f_one_b, (1,), "1F1B for lockstep: forwards together, backwards together"),
    "interleaved_1f1b": Schedule(interleaved_one_f_one_b, (), "1F1B over several chunks a stage"),
    "zb_h1": Schedule(zb_h1, (1,), "1F1B with weight gradients apart"),
    "zb_v": Schedule(zb_v, (2,), "two chunks in a V, no bubble at equal costs"),
    "v_half": Schedule(v_half, (2,), "two chunks in a V, half the activations"),
}


def make(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Table:
    """The table of a shipped schedule.

    Args:
        name: of `SCHEDULES`.
        stages: pipeline stages, at least 1.
        microbatches: of a step, at least 1.
        chunks: virtual stages a stage; default: what the schedule has, 2 for `interleaved_1f1b`.

    Raises:
        ScheduleError: no such schedule, or one that cannot have these numbers.
    """
    if name not in SCHEDULES:
        hint = (
            did_you_mean(name, SCHEDULES) or f"; expected {join_words(SCHEDULES)}, or the path of a .csv or .yaml table"
        )
        raise ScheduleError(f"schedule: no schedule `{name}`{hint}")
    able = SCHEDULES[name].chunks
    chunks = (able or (2,))[0] if chunks is None else chunks
    for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ScheduleError(f"schedule {name}: {what}: expected at least 1; found {number}")
    if able and chunks not in able:
        other = "; interleaved_1f1b has any number of chunks" if able == (1,) else ""
        raise ScheduleError(f"schedule {name}: chunks: expected {join_words(able)}; found {chunks}{other}")
    return SCHEDULES[name].make(stages, microbatches, chunks)


def _in_turn(microbatches: int, backward: Action) -> tuple[list[Step], list[Step]]:
    """The forwards and backwards of one chunk."""
    numbers = range(microbatches)
    return [Step(Action.F, i) for i in numbers], [Step(backward, i) for i in numbers]


def _in_rounds(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    """Rounds of `stages` microbatches, which go through the first chunk of every stage, then the second, and so on."""
    rounds = range(0, microbatches, stages)
    turns = [(chunk, first + i) for first in rounds for chunk in range(chunks) for i in range(stages)]
    forwards = [Step(Action.F, microbatch, chunk) for chunk, microbatch in turns]
    backwards = [Step(Action.BW, microbatch, chunks - 1 - chunk) for chunk, microbatch in turns]
    orders = [
        [step for step in _alternate(forwards, backwards, warmup) if step.microbatch < microbatches]
        for warmup in (2 * (stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages))
    ]
    return place(orders, name=name, placement="loop", microbatches=microbatches, chunks=chunks, aligned=True)


def _alternate(forwards: Sequence[Step], backwards: Sequence[Step], warmup: int) -> list[Step]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    order = list(forwards[:warmup])
    for index, backward in enumerate(backwards):
        order += [*forwards[warmup + index : warmup + index + 1], backward]
    return order


def _v_orders(stages: int, microbatches: int, down: int, up: int) -> list[list[Step]]:
    """Orders of a V from one microbatch's ticks repeated every 6, a stage's work on a microbatch (arXiv 2405.15362).

    A microbatch goes from virtual stage to virtual stage every `down` ticks in its first chunk's forward and second
    chunk's backward, and every `up` ticks in the other two passes. What is between its F and B fills the memory: a
    stage keeps up to (down + up) * 2p / 6 chunks' activations, so 4 + 2 gives those of 1F1B and 2 + 1 half of them.
    """
    turn = (down + up) * (stages - 1) + 1  # the tick of the last F
    orders = []
    for stage in range(stages):
        far = stages - 1 - stage
        ticks = {
            Step(Action.F, 0, 0): down * stage,
            Step(Action.F, 0, 1): turn - up * stage,
            Step(Action.B, 0, 1): turn + 1 + down * stage,
            Step(Action.B, 0, 0): turn + 2 + down * (stages - 1) + up * far,
        }
        timed = [
            (tick + 6 * i, step._replace(microbatch=i)) for step, tick in ticks.items() for i in range(microbatches)
        ]
        orders.append([step for _, step in sorted(timed)])
    return orders
