"""The parameters of every replica after every step, against histories worked out in NumPy."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy_histories as golden
import pytest
import tiny_net
from flax import nnx

EXPECTED = json.loads(golden.GOLDEN.read_text(encoding="utf-8"))


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jnp.zeros(golden.FEATURES))

    def loss(self, batch: Any, key: Any) -> Any:
        return jnp.mean(jnp.square(batch["x"] @ self.w[...] - batch["y"]))


class Points:
    def __init__(self, **_: Any) -> None: ...

    def batch(self, step: int, rows: Any = slice(None)) -> dict[str, np.ndarray]:
        x, y = golden.rows(step)
        return {"x": x[rows].astype(np.float32), "y": y[rows].astype(np.float32)}


@pytest.mark.parametrize("name", golden.STRATEGIES)
def test_the_golden_histories_are_those_of_numpy(name: str) -> None:
    for kind, values in golden.history(golden.STRATEGIES[name]).items():
        np.testing.assert_allclose(values, EXPECTED[name][kind], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", golden.STRATEGIES)
def test_replicas_move_as_numpy_says(name: str) -> None:
    program = tiny_net.program(
        {"replica": golden.REPLICAS}, model={"type": "test_histories:Line"}, sync=golden.STRATEGIES[name],
        data={"type": "test_histories:Points", "global_batch": golden.ROWS}, rules={"batch": []},
        optimizer={"lr": golden.INNER_LR}, steps=golden.STEPS, example=Points().batch(0),
    )  # fmt: skip
    state, found = program.init(), {"local": [], "agreed": []}
    for step in range(golden.STEPS):
        state, metrics = program.step_at(step)(state, Points().batch(step))
        found["local"].append(np.asarray(state["params"]["w"]))
        found["agreed"].append(np.asarray(program.agreed(state)["params"]["w"]))
        done = step + 1 - golden.STRATEGIES[name].get("bsp_steps", 0)
        assert ("consensus_distance" in metrics) == (done > 0 and done % golden.EVERY == 0)
    for kind, values in found.items():
        np.testing.assert_allclose(values, EXPECTED[name][kind], rtol=1e-5, atol=1e-5)
