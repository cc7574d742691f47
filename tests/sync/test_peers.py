"""post_local and local_sgd against torch's PostLocalSGDOptimizer, and diloco against one that drjax averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_net import LAYOUTS, replicas, rows, run
from torch_pair import run_pair

STEPS = 12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bsp_steps", [0, 3])
def test_local_steps_are_those_of_torch(layout: str, bsp_steps: int, tmp_path: Path) -> None:
    """Parameters of both replicas after every step of SGD, of joint ones first."""
    pytest.importorskip("torch", reason="the cross-check needs torch")
    kind = {"strategy": "post_local", "bsp_steps": bsp_steps} if bsp_steps else {"strategy": "local_sgd"}
    program = replicas(2, layout, sync={**kind, "every": 4}, optimizer={"lr": 0.1})
    start = {name: np.asarray(x[0]) for name, x in program.init()["params"].items()}
    batches = [rows(step) for step in range(STEPS)]
    data = {name: np.stack([batch[name] for batch in batches]) for name in ("x", "y")}
    np.savez(tmp_path / "given.npz", bsp_steps=bsp_steps, every=4, lr=np.float32(0.1), **start, **data)
    run_pair("torch_post_local.py", tmp_path)
    _, history = run(program, STEPS)
    apart = np.abs(history[bsp_steps]["params"]["a"][0] - history[bsp_steps]["params"]["a"][1]).max()
    assert apart > 1e-3
    for replica in range(2):
        theirs = np.load(tmp_path / f"found-{replica}.npz")
        for step, ours in enumerate(history):
            for name in ("a", "b"):
                np.testing.assert_allclose(ours["params"][name][replica], theirs[name][step], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_diloco_is_that_of_drjax(layout: str) -> None:
    """Outer parameters after every round, with Adam inside and Nesterov's momentum outside."""
    drjax = pytest.importorskip("drjax", reason="the cross-check needs drjax")
    every, inner, outer = 4, optax.adam(0.02), optax.sgd(0.7, 0.9, nesterov=True)
    sync = {"strategy": "diloco", "every": every, "outer": {"lr": 0.7, "momentum": 0.9}}
    program = replicas(2, layout, sync=sync, optimizer={"name": "optax.adam", "lr": 0.02})
    x = {name: jnp.asarray(value[0]) for name, value in program.init()["params"].items()}

    def loss(params: Any, batch: Any) -> jax.Array:
        error = jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]
        return jnp.sum(error**2) / len(error)

    def local_steps(params: Any, moments: Any, batches: Any) -> Any:
        for step in range(every):
            grads = jax.grad(loss)(params, jax.tree.map(lambda v: v[step], batches))  # noqa: B023
            updates, moments = inner.update(grads, moments)
            params = optax.apply_updates(params, updates)
        return params, moments

    @drjax.program(placements={"replicas": 2})
    def one_round(x: Any, moments: Any, velocity: Any, batches: Any) -> Any:
        params, moments = drjax.map_fn(local_steps, (drjax.broadcast(x), moments, batches))
        change = jax.tree.map(jnp.subtract, x, drjax.reduce_mean(params))
        updates, velocity = outer.update(change, velocity)
        return optax.apply_updates(x, updates), moments, velocity

    moments, velocity = jax.vmap(inner.init)(jax.tree.map(lambda v: jnp.stack([v, v]), x)), outer.init(x)
    _, history = run(program, STEPS)
    for first in range(0, STEPS, every):
        batches = [rows(step) for step in range(first, first + every)]
        parts = {n: np.stack([b[n].reshape(2, -1, *b[n].shape[1:]) for b in batches], 1) for n in ("x", "y")}
        x, moments, velocity = jax.jit(one_round)(x, moments, velocity, parts)
        for name, value in x.items():
            ours = history[first + every - 1]["agreed"][name]
            np.testing.assert_allclose(ours, value, rtol=1e-5, atol=1e-6)
