"""Frozen parameters of the shipped decoder: no gradient, no memory for one, and every command still sees them."""

from __future__ import annotations

import harness
import jax
import numpy as np
import pytest

from jaxtrain.inference.generate import Generator
from jaxtrain.models.model_def import merge_trees, select_paths

FROZEN = {"frozen": ["layers/(attention|mlp)/.*", "vocab"]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [{}, {"microbatches": 2}])
def test_frozen_parameters_stay_on_every_layout(step: dict):
    model = {**harness.MODEL, **FROZEN}
    alone, split = (
        harness.program(mesh, model=model, step=step) for mesh in (None, {"data": 2, "fsdp": 2, "model": 2})
    )
    expected, metrics = harness.run(alone, 4)
    state, found = harness.run(split, 4)
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
    harness.close_trees(expected["params"], state["params"], 1e-4)
    for a, b in zip(jax.tree.leaves(alone.init()["frozen"]), jax.tree.leaves(state["frozen"]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_falls_by_their_gradients_and_moments():
    def bytes_of(model: dict) -> tuple[int, int]:
        program = harness.program({"data": 2}, model=model)
        memory = program.step.lower(program.state, harness.batch(0)).compile().memory_analysis()
        return memory.argument_size_in_bytes, memory.temp_size_in_bytes

    whole, trained = bytes_of(harness.MODEL), bytes_of({**harness.MODEL, **FROZEN})
    program = harness.program({"data": 2}, model={**harness.MODEL, **FROZEN})
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(program.state["frozen"]))
    assert whole[0] - trained[0] == pytest.approx(2 * size, rel=0.02)  # two moments of AdamW
    assert whole[1] - trained[1] > 0.5 * size  # gradients


def test_generation_takes_them_with_the_trained_ones():
    plain, program = harness.program(), harness.program(model={**harness.MODEL, **FROZEN})
    params = plain.init()["params"]
    state = {kind: select_paths(params, program.state[kind]) for kind in ("params", "frozen")}
    merged = merge_trees(state["params"], state["frozen"])
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    prompt = np.arange(1, 6, dtype=np.int32)
    tokens = [
        list(Generator(one.model_def, 250, temperature=0)(params, prompt, 8, seed=0))
        for one, params in ((plain, params), (program, merged))
    ]
    assert tokens[0] == tokens[1]
