"""Sequences in shards never change the result: every formulation against one device, alone and with everything else."""

from __future__ import annotations

import functools
import re

import harness
import jax
import numpy as np
import pytest
from harness import close_trees

from jaxtrain.core.placement import Placer, row_order
from jaxtrain.core.program import model_from_config
from jaxtrain.hlo.device_groups import replica_groups, replica_groups_text
from jaxtrain.inference.generate import Generator, decoding_sharder

FORMULATIONS = ("gather", "ulysses", "ring")
RULES = {
    "batch": ["data", "fsdp"], "sequence": ["context", "model"], "context": "context", "embed": ["fsdp", "context"],
    "heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model",
}  # fmt: skip
LIGHT = {"sliding_window_pattern": 1}  # one kind of layer compiles in half the time
FSDP, ALL = {"fsdp": 2, "context": 4}, {"fsdp": 2, "context": 2, "model": 2}


@functools.cache
def one_device():
    return harness.run(harness.program(), 20)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_twenty_steps_equal_one_device(formulation: str):
    state, metrics = harness.run(harness.program({"context": 4}, RULES, context_parallel=formulation), 20)
    expected_state, expected = one_device()
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-4)
    close_trees(expected_state["params"], state["params"], 1e-4)


def gradients(program):
    return jax.jit(program.gradients)(program.init()["params"], harness.placed(program, 0), jax.random.key(0)).grads


@functools.cache
def one_device_gradients(window: int = 24):
    return gradients(harness.program(model={**LIGHT, "sliding_window": window}))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("formulation", "mesh", "step"),
    [
        ("gather", ALL, {}),
        ("ulysses", ALL, {"remat": "full"}),
        ("ring", ALL, {}),
        ("ring", FSDP, {"remat": "full"}),
        ("ring", {"data": 2, "context": 2}, {"microbatches": 2}),
        ("auto", {"context": 8}, {"microbatches": 2}),  # 4 heads: gather
    ],
    ids=str,
)
def test_every_gradient_equals_one_device(formulation: str, mesh: dict, step: dict):
    program = harness.program(mesh, RULES, context_parallel=formulation, step=step, model=LIGHT)
    close_trees(one_device_gradients(), gradients(program), 1e-5)


def test_short_windows_by_halo():
    """And weights that are not stored over `context`."""
    rules = {**RULES, "embed": "fsdp", "sequence": "context"}
    program = harness.program(FSDP, rules, context_parallel="ring", model={**LIGHT, "sliding_window": 5})
    close_trees(one_device_gradients(5), gradients(program), 1e-5)


def test_generation_on_a_ring():
    prompt, texts = np.array([3, 1, 4, 1, 5], np.int32), []
    for program in (harness.program(model=LIGHT), harness.program(FSDP, RULES, context_parallel="ring", model=LIGHT)):
        tree = program.init()["params"]
        model_def = model_from_config(program.config, decoding_sharder(program.sharder), 256)
        texts.append(list(Generator(model_def, 250, temperature=0)(tree, prompt, 8, seed=0)))
    assert texts[0] == texts[1]


def test_rows_are_permuted_on_the_host_for_the_ring_alone():
    host = {"tokens": np.arange(64, dtype=np.int32).reshape(2, 32), "labels": np.arange(2)}
    for formulation, first in (("ring", [0, 1, 2, 3, 28, 29, 30, 31]), ("ulysses", list(range(8)))):
        program = harness.program({"context": 4}, RULES, context_parallel=formulation)
        order = row_order(program.config.context_parallel, program.config.data.sequence, program.sharder)
        batch = Placer(lambda step, rows: host, program.sharder, 2, True, order)(0)
        shards = {s.index[1].start or 0: np.asarray(s.data) for s in batch["tokens"].addressable_shards}
        assert shards[0].tolist() == [first, [32 + i for i in first]]
        assert batch["labels"].tolist() == [0, 1]
    assert row_order("auto", 32, harness.program().sharder) is None
    short = Placer(lambda step, rows: {"tokens": host["tokens"][:, :16]}, program.sharder, 2, True, np.arange(32))
    with pytest.raises(ValueError, match=r"data\.sequence: expected rows of 32 tokens from the data; found 16"):
        short(0)


def collectives(formulation: str) -> list[tuple[str, str, str]]:
    """Kind, shape and origin of every collective of the compiled gradient of four layers on four shards."""
    model = {"layers": 4, "sliding_window": None, "sliding_window_pattern": 1, "heads": 8, "kv_heads": 4}
    program = harness.program({"context": 4}, RULES, context_parallel=formulation, model=model)
    run = jax.jit(program.gradients)
    args = (program.state["params"], harness.placed(program, 0), jax.random.key(0))
    text = run.lower(*args).compile().as_text()
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    pattern = re.compile(rf"= (\S+|\(.*?\)) ({kinds})\(.*op_name=\"(.*?)\"")
    found = [(match, line) for line in text.splitlines() if (match := pattern.search(line))]
    groups = [replica_groups(replica_groups_text(line), 4) for _, line in found]
    moves = [match for (match, _), group in zip(found, groups, strict=True) if len(group[0]) > 1]
    return [(match[2], match[1], match[3]) for match in moves]


def test_only_the_expected_collectives():
    """Ulysses: q, k, v and the output once each way. Ring of 4: 3 hops of keys and values, and of their gradients."""
    for formulation, kind, forward, backward in (
        ("ulysses", "all-to-all", 4, 4),
        ("ring", "collective-permute", 6, 12),
    ):
        found = collectives(formulation)
        inside = [row for row in found if f"attention_{formulation}" in row[2]]
        assert {row[0] for row in inside} == {kind}
        assert sum("transpose" not in row[2] for row in inside) == forward
        assert sum("transpose" in row[2] for row in inside) == backward
        # Nothing else of the layers moves but their weights: neither documents nor activations.
        layers = [row for row in found if "while/body" in row[2] and row not in inside and "entropy" not in row[2]]
        assert layers
        assert not [row for row in layers if row[1].startswith("s32") or re.match(r"f32\[8,(8|32),", row[1])]
        assert not [row for row in layers if row[0] not in ("all-gather", "all-reduce")]
