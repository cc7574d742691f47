"""The buffers of a table, by an executor of symbols that does what they say and nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_reference import cells, path
from test_schedule import tables

from jaxtrain.pipeline.buffers import Kind, Way, buffers
from jaxtrain.pipeline.schedules.shipped import make


def execute(table, program):
    """Runs it as SPMD: all read and compute, all send, all write. Returns the weight gradients computed.

    A value is (what, microbatch, part of the model); an action asserts that it reads the right ones.
    """
    p, places = table.stages, path(table.placement, table.stages, table.chunks)
    part = {place: k for k, place in enumerate(places)}
    last = len(places) - 1
    rings = ("activations", "gradients", "until_backward", "until_weight", "backward_to_weight")
    store = {name: [["junk"] * (getattr(program, name).slots + 1) for _ in range(p)] for name in rings}
    gradients, grid = [], cells(table)

    for tick in range(table.ticks):
        out, losses = ["junk"] * p, {}
        for stage in range(p):
            where = tick, stage

            def read(name, at=where):
                return store[name][at[1]][getattr(program, name).read[at]]

            def write(name, value, at=where):
                store[name][at[1]][getattr(program, name).write[at]] = value

            letter, i, chunk = grid.get(where, ("", 0, 0))
            k = part.get((stage, chunk))
            if letter == "F":
                assert program.activations.read[where] == -1 if k == 0 else read("activations") == ("x", i, k)
                write("until_backward", ("kept", i, k))
                write("until_weight", ("kept", i, k))
                out[stage] = ("x", i, k + 1)
                if k == last:
                    losses[stage] = ("g", i, k)
            elif letter:
                assert letter == "W" or read("until_backward") == ("kept", i, k)
                assert letter == "B" or read("until_weight") == ("kept", i, k)
            if letter in ("B", "BW"):
                assert read("gradients") == ("g", i, k)
                out[stage] = ("g", i, k - 1)
            if letter == "B":
                write("backward_to_weight", ("both", i, k))
            if letter == "W":
                assert read("backward_to_weight") == ("both", i, k)
            if "W" in letter:
                gradients.append((i, k))
        # Two permutations, whatever is in them; what nobody meant to send must not be read.
        forward = [out[stage] if program.send[tick, stage] == Way.NEXT else "junk" for stage in range(p)]
        back = [out[stage] if program.send[tick, stage] == Way.PREVIOUS else "junk" for stage in range(p)]
        here = [out[stage] if program.send[tick, stage] == Way.HERE else "junk" for stage in range(p)]
        for stage in range(p):
            slot = program.from_loss[tick, stage]
            assert (slot != -1) == (stage in losses)
            if stage in losses:
                store["gradients"][stage][slot] = losses[stage]
            sides = (
                (program.from_previous, forward[stage - 1]),
                (program.from_next, back[(stage + 1) % p]),
                (program.from_here, here[stage]),
            )
            for side, value in sides:
                kind, slot = Kind(side.kind[tick, stage]), side.slot[tick, stage]
                assert (kind == Kind.NOTHING) == (value == "junk") == (slot == -1)
                if kind:
                    at = part[stage, int(side.chunk[tick, stage])]
                    letter = "x" if kind == Kind.ACTIVATION else "g"
                    assert value == (letter, int(side.microbatch[tick, stage]), at)
                    store["activations" if letter == "x" else "gradients"][stage][slot] = value
    return gradients


@settings(deadline=None, max_examples=120)
@given(tables())
def test_every_action_reads_what_is_its_own(table):
    found = execute(table, buffers(table))
    parts = table.stages * table.chunks
    assert sorted(found) == [(i, k) for i in range(table.microbatches) for k in range(parts)]


@settings(deadline=None, max_examples=60)
@given(tables())
def test_no_more_slots_than_items_at_once(table):
    """Counted tick by tick: what is written and not yet read when a tick ends."""
    program, places = buffers(table), path(table.placement, table.stages, table.chunks)
    when = {(part, stage, *rest): t for (t, stage), (letter, *rest) in cells(table).items() for part in letter}
    spans = {
        name: [[] for _ in range(table.stages)] for name in ("activations", "gradients", "backward", "weight", "bw")
    }
    for i in range(table.microbatches):
        for stage, chunk in places:
            forward, backward, weight = (when[part, stage, i, chunk] for part in "FBW")
            spans["backward"][stage].append((forward, backward))
            spans["weight"][stage].append((forward, weight))
            spans["bw"][stage].append((backward, weight))
        spans["gradients"][stage].append((forward, backward))  # of the loss, at the last place
        for (s0, c0), (s1, c1) in pairwise(places):
            spans["activations"][s1].append((when["F", s0, i, c0], when["F", s1, i, c1]))
            spans["gradients"][s0].append((when["B", s1, i, c1], when["B", s0, i, c0]))
    most = {
        name: max(sum(a <= t < b for a, b in row) for row in rows for t in range(table.ticks))
        for name, rows in spans.items()
    }
    assert program.activations.slots == most["activations"]
    assert program.gradients.slots == most["gradients"]
    assert program.until_backward.slots == most["backward"]
    assert program.until_weight.slots == most["weight"]
    assert program.backward_to_weight.slots == most["bw"]


def test_slots_of_known_schedules():
    def slots(name, p, m):
        b = buffers(make(name, p, m))
        rings = (b.activations, b.gradients, b.until_backward, b.until_weight, b.backward_to_weight)
        return [ring.slots for ring in rings]

    assert slots("1f1b", 4, 100) == slots("1f1b", 4, 10) == [1, 1, 4, 4, 0]
    assert slots("zb_h1", 4, 100) == [1, 1, 4, 4, 4]
    assert slots("gpipe", 4, 9) == [1, 9, 9, 9, 0]
    assert slots("v_half", 8, 100)[3] == 10


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 8))
def test_a_v_turns_within_a_stage_and_never_goes_round(p, m):
    program = buffers(make("zb_v", p, m))
    turns = [(program.from_here.kind[:, stage] > 0).sum() for stage in range(p)]
    assert turns == [0] * (p - 1) + [2 * m]
    assert not (program.from_previous.kind[:, 0] > 0).any()
    assert not (program.from_next.kind[:, -1] > 0).any()


def test_a_loop_goes_round():
    program = buffers(make("interleaved_1f1b", 4, 4))
    assert (program.from_previous.kind[:, 0] == Kind.ACTIVATION).sum() == 4
    assert (program.from_next.kind[:, 3] == Kind.GRADIENT).sum() == 4
    assert np.count_nonzero(program.send == Way.HERE) == 0
