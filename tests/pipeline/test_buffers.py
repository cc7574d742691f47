"""The buffers of a table, tested by an executor that moves symbols instead of arrays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_reference import cells, path
from test_schedule import tables

from jaxtrain.pipeline.buffers import Destination, Payload, allocate_buffers
from jaxtrain.pipeline.schedules.shipped import shipped_table


def execute(table, program):
    """Runs a table as SPMD: all read and compute, all send, all write. Returns the weight gradients computed.

    A value is (kind, microbatch, virtual stage); every action asserts that it reads the right values.
    """
    p, locations = table.stages, path(table.placement, table.stages, table.chunks)
    virtual = {location: k for k, location in enumerate(locations)}
    last = len(locations) - 1
    buffers = ("activations", "gradients", "residuals_until_b", "residuals_until_w", "b_to_w")
    store = {name: [["junk"] * (getattr(program, name).slots + 1) for _ in range(p)] for name in buffers}
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
            k = virtual.get((stage, chunk))
            if letter == "F":
                assert program.activations.read[where] == -1 if k == 0 else read("activations") == ("x", i, k)
                write("residuals_until_b", ("residuals", i, k))
                write("residuals_until_w", ("residuals", i, k))
                out[stage] = ("x", i, k + 1)
                if k == last:
                    losses[stage] = ("g", i, k)
            elif letter:
                assert letter == "W" or read("residuals_until_b") == ("residuals", i, k)
                assert letter == "B" or read("residuals_until_w") == ("residuals", i, k)
            if letter in ("B", "BW"):
                assert read("gradients") == ("g", i, k)
                out[stage] = ("g", i, k - 1)
            if letter == "B":
                write("b_to_w", ("saved", i, k))
            if letter == "W":
                assert read("b_to_w") == ("saved", i, k)
            if "W" in letter:
                gradients.append((i, k))
        # Two permutations of all stages; a value that a stage did not mean to send must not be read.
        forward = [out[stage] if program.send[tick, stage] == Destination.NEXT else "junk" for stage in range(p)]
        back = [out[stage] if program.send[tick, stage] == Destination.PREVIOUS else "junk" for stage in range(p)]
        here = [out[stage] if program.send[tick, stage] == Destination.SELF else "junk" for stage in range(p)]
        for stage in range(p):
            slot = program.loss_gradient[tick, stage]
            assert (slot != -1) == (stage in losses)
            if stage in losses:
                store["gradients"][stage][slot] = losses[stage]
            sides = (
                (program.from_previous, forward[stage - 1]),
                (program.from_next, back[(stage + 1) % p]),
                (program.from_self, here[stage]),
            )
            for side, value in sides:
                payload, slot = Payload(side.payload[tick, stage]), side.slot[tick, stage]
                assert (payload == Payload.NONE) == (value == "junk") == (slot == -1)
                if payload:
                    at = virtual[stage, int(side.chunk[tick, stage])]
                    letter = "x" if payload == Payload.ACTIVATION else "g"
                    assert value == (letter, int(side.microbatch[tick, stage]), at)
                    store["activations" if letter == "x" else "gradients"][stage][slot] = value
    return gradients


@settings(max_examples=120)
@given(tables())
def test_every_action_reads_its_own_values(table):
    gradients = execute(table, allocate_buffers(table))
    virtual_stages = table.stages * table.chunks
    assert sorted(gradients) == [(i, k) for i in range(table.microbatches) for k in range(virtual_stages)]


@settings(max_examples=60)
@given(tables())
def test_no_more_slots_than_values_at_once(table):
    """Counts, tick by tick, the values that are written and not yet read when the tick ends."""
    program, locations = allocate_buffers(table), path(table.placement, table.stages, table.chunks)
    when = {(part, stage, *rest): t for (t, stage), (letter, *rest) in cells(table).items() for part in letter}
    spans = {
        name: [[] for _ in range(table.stages)] for name in ("activations", "gradients", "backward", "weight", "bw")
    }
    for i in range(table.microbatches):
        for stage, chunk in locations:
            forward, backward, weight = (when[part, stage, i, chunk] for part in "FBW")
            spans["backward"][stage].append((forward, backward))
            spans["weight"][stage].append((forward, weight))
            spans["bw"][stage].append((backward, weight))
        spans["gradients"][stage].append((forward, backward))  # of the loss, at the last virtual stage
        for (s0, c0), (s1, c1) in pairwise(locations):
            spans["activations"][s1].append((when["F", s0, i, c0], when["F", s1, i, c1]))
            spans["gradients"][s0].append((when["B", s1, i, c1], when["B", s0, i, c0]))
    most = {
        name: max(sum(a <= t < b for a, b in row) for row in rows for t in range(table.ticks))
        for name, rows in spans.items()
    }
    assert program.activations.slots == most["activations"]
    assert program.gradients.slots == most["gradients"]
    assert program.residuals_until_b.slots == most["backward"]
    assert program.residuals_until_w.slots == most["weight"]
    assert program.b_to_w.slots == most["bw"]


def test_slots_of_known_schedules():
    def slots(name, p, m):
        b = allocate_buffers(shipped_table(name, p, m))
        all_buffers = (b.activations, b.gradients, b.residuals_until_b, b.residuals_until_w, b.b_to_w)
        return [buffer.slots for buffer in all_buffers]

    assert slots("1f1b", 4, 100) == slots("1f1b", 4, 10) == [1, 1, 4, 4, 0]
    assert slots("zb_h1", 4, 100) == [1, 1, 4, 4, 4]
    assert slots("gpipe", 4, 9) == [1, 9, 9, 9, 0]
    assert slots("v_half", 8, 100)[3] == 10


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 8))
def test_a_v_turns_within_a_stage_and_never_wraps(p, m):
    program = allocate_buffers(shipped_table("zb_v", p, m))
    turns = [(program.from_self.payload[:, stage] > 0).sum() for stage in range(p)]
    assert turns == [0] * (p - 1) + [2 * m]
    assert not (program.from_previous.payload[:, 0] > 0).any()
    assert not (program.from_next.payload[:, -1] > 0).any()


def test_a_loop_wraps():
    program = allocate_buffers(shipped_table("interleaved_1f1b", 4, 4))
    assert (program.from_previous.payload[:, 0] == Payload.ACTIVATION).sum() == 4
    assert (program.from_next.payload[:, 3] == Payload.GRADIENT).sum() == 4
    assert np.count_nonzero(program.send == Destination.SELF) == 0
