"""Top-k of deep gradient compression: the share falls in a warm-up, and gradients of replicas are clipped before."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_net
from selection import one_in
from test_compressed_gradients import EMBED, LAYERS, MLP, stacked
from test_onebit_adam import LAYOUTS, STACK, batch_of, clipped, numpy_gradients
from test_run import resumed_bitwise
from tiny_net import WIDTH, replicas

from jaxtrain.config.sections.sync import CompressConfig
from jaxtrain.hlo.collectives import count_collectives
from jaxtrain.planning.assess import _phases_note
from jaxtrain.sync.compression.phases import first_phases

SHARE, WARMUP, MOMENTUM, CLIP, LR = 0.01, 6, 0.5, 1.6, 0.05
SHARES = [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625]  # of the steps of the warm-up
SGD = {"name": "sgd", "lr": LR, "betas": [0.0, 0.9], "weight_decay": 0.0, "grad_clip_norm": None}


def topk(warmup: int = WARMUP, **more: Any) -> dict[str, Any]:
    return {"strategy": "bsp", "compress": {"gradients": "topk", "share": SHARE, "warmup": warmup, **more}}


def test_the_share_falls_by_factors_of_four_in_equal_parts_of_the_warmup() -> None:
    """As the sparsity of the paper: 75%, 93.75%, 98.4375%, 99.6%, and then 99.9%."""

    def shares(**keys: Any) -> list[tuple[int, float]]:
        config = CompressConfig(gradients="topk", **keys)
        return [(end, phase.share) for end, phase in first_phases(config)]

    assert shares(share=0.001, warmup=400) == [(100, 1 / 4), (200, 1 / 16), (300, 1 / 64), (400, 1 / 256)]
    assert shares(share=0.01, warmup=100) == [(33, 1 / 4), (66, 1 / 16), (100, 1 / 64)]
    assert shares(share=0.0625, warmup=7) == [(7, 1 / 4)]
    assert shares(share=0.01) == []


def numpy_history(w: np.ndarray, steps: int, count: int) -> list[np.ndarray]:
    """Weights after every step of SGD on the largest values of each replica's sum of velocities."""
    w = w.astype(np.float64)
    velocity, left, found = np.zeros((count, w.size)), np.zeros((count, w.size)), []
    for step in range(steps):
        apart = [clipped(g, CLIP * count**0.5) for g in numpy_gradients(w, step, count)]
        velocity = MOMENTUM * velocity + np.stack(apart).reshape(count, -1)
        left, sent = left + velocity, np.zeros_like(left)
        for own in range(count):
            chosen = np.argsort(-np.abs(left[own]))[: ceil((*SHARES, SHARE)[min(step, WARMUP)] * w.size)]
            sent[own, chosen] = left[own, chosen]
            left[own, chosen] = velocity[own, chosen] = 0
        w = w - LR * sent.mean(0).reshape(w.shape)
        found.append(w)
    return found


@pytest.mark.parametrize(("count", "layout"), one_in(2, [2, 4], LAYOUTS))
def test_a_history_across_the_warmup_is_that_of_numpy(count: int, layout: str) -> None:
    model, sync = {"type": "test_onebit_adam:Linear"}, topk(momentum=MOMENTUM, clip=CLIP)
    program = replicas(count, layout, sync=sync, optimizer=SGD, model=model)
    state = program.init()
    before = np.asarray(state["params"]["w"])
    norms = []
    for step, w in enumerate(numpy_history(before, 9, count)):
        norms += [np.linalg.norm(g) for g in numpy_gradients(np.float64(before), step, count)]
        state, _ = program.step_at(step)(state, batch_of(step))
        np.testing.assert_allclose(state["params"]["w"], w, atol=1e-6)
        before = w
    assert min(norms) < CLIP * count**0.5 < max(norms)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_share_has_a_program_that_sends_its_bytes_and_the_last_is_the_plain_one(layout: str) -> None:
    program, plain = (stacked(layout, topk(warmup)) for warmup in (WARMUP, 0))
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tiny_net.rows(0).items()}
    programs = [program.step_at(step) for step in range(WARMUP + 2)]
    assert len(set(map(id, programs))) == 4
    assert programs[WARMUP] is programs[WARMUP + 1] is program.step
    whole, sizes = 4 * 2 * WIDTH * EMBED, []
    for step, share in ((0, SHARES[0]), (2, SHARES[2]), (4, SHARES[4]), (WARMUP, SHARE)):
        run: Any = programs[step]
        lowered = run.lower(program.state, batch)
        rows = count_collectives(lowered.compile().as_text(), dict(program.sharder.mesh.shape))
        sizes.append(sum(row.bytes for row in rows if program.synchronizer.strategy.axis in row.axes))
        values = 2 * LAYERS * ceil(share * EMBED * MLP)
        assert 0 <= sizes[-1] - (8 * values + whole) / 2 < 64  # a replica has two devices, and sends to one other
    exact: Any = plain.step
    assert lowered.as_text() == exact.lower(plain.state, batch).as_text()


def test_runs_that_are_resumed_within_the_warmup_and_after_it_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole = resumed_bitwise(tmp_path, topk(4, clip=0.5), model=STACK)
    assert np.abs(whole.state["sync"]["own"]["worker"]["up"]).max() > 0


def test_plan_says_what_first_steps_send_in_the_mean() -> None:
    assert _phases_note([(2, 8e6), (4, 2e6), (10, 1e6)]) == (
        "between replicas a device sends 5 MB in each of the first 4 steps in the mean, and 1 MB in later ones, of"
        " which this plan is; in that of all 2.6 MB"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"sync": topk(12)},
            "sync.compress.warmup: of 12 steps none comes after 12 of warm-up; expected less than steps",
        ),
        (
            {"sync": topk(4, share=0.25)},
            "sync.compress.warmup: the warm-up begins with a share of 0.25, and that after it is 0.25; expected",
        ),
        ({"sync": topk(-1)}, "sync.compress.warmup: expected at least 0; found -1"),
        ({"sync": topk(4, clip=0.0)}, "sync.compress.clip: expected more than 0; found 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(changes: dict[str, Any], text: str, problems: Callable[..., str]) -> None:
    assert text in problems(**changes)
