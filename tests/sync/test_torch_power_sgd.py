"""PowerSGD against torch's `powerSGD_hook`, run by two processes on the same gradients."""

from __future__ import annotations

from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_compressed_gradients import compressed, gradients, stacked
from torch_pair import run_pair

pytest.importorskip("torch", reason="the cross-check needs torch")
STEPS = 5


@pytest.mark.parametrize("rank", [1, 4])
def test_means_and_errors_are_those_of_torch(rank: int, tmp_path: Path) -> None:
    """Of five steps, with error feedback and Q of the step before; torch has each layer as a tensor of its own."""
    program = stacked("fsdp", compressed("powersgd", rank=rank))
    strategy, state = program.synchronizer.strategy, program.init()
    own = state["sync"]["own"]
    names = list(state["params"])
    factors = {names[int(place)]: np.asarray(q) for place, q in own["factors"].items()}
    layers = {name: (state["params"][name].shape[0] if name in ("up", "down") else None) for name in names}
    given: dict[str, np.ndarray] = {}
    found: dict[str, np.ndarray] = {}
    step = jax.jit(strategy.combine)
    for time in range(STEPS):
        grads = gradients(program, 2, time)
        own, mean, _ = step(own, grads, jnp.ones(2))
        for name in names:
            given |= _apart(name, time, np.asarray(grads[name]), layers[name], 1)
            found |= _apart(name, time, np.asarray(mean[name]), layers[name], 0)
    order = [key.removesuffix("/0") for key in given if key.endswith("/0")]
    shapes = {key: given[f"{key}/0"].shape[1:] for key in order}
    batches = list(dict.fromkeys(shapes.values()))  # torch takes tensors of one shape together
    packed = [key for key in order if min(rank, *shapes[key]) * sum(shapes[key]) < np.prod(shapes[key])]
    by_shape = sorted(packed, key=lambda key: batches.index(shapes[key]))
    q = np.concatenate([_factor(key, factors).reshape(-1) for key in by_shape])
    p_size = sum(shapes[key][0] * min(rank, *shapes[key]) for key in by_shape)
    np.savez(tmp_path / "given.npz", names=order, steps=STEPS, rank=rank, q=q, p_size=p_size, **given)
    run_pair("torch_power_sgd.py", tmp_path)
    errors = {name: np.asarray(own["worker"][name]) for name in names}
    for replica in range(2):
        theirs = np.load(tmp_path / f"found-{replica}.npz")
        harness.close_trees({key: theirs[key] for key in found}, found, 1e-5)
        places = np.cumsum([0, *(np.prod(shapes[key]) for key in order)])
        for key, start in zip(order, places[:-1], strict=True):
            if key in packed:  # torch keeps the difference from the mean also of what travels whole; its mean is 0
                own_error = _error(key, errors, replica)
                expected = theirs["errors"][start : start + own_error.size].reshape(own_error.shape)
                harness.close_trees({key: expected}, {key: own_error}, 1e-5)
    assert len(packed) == {1: 6, 4: 4}[rank]


def _apart(name: str, time: int, value: np.ndarray, layers: int | None, dim: int) -> dict[str, np.ndarray]:
    """A tensor, or its layers along a dim, by `NAME/STEP` or `NAME.LAYER/STEP`."""
    if layers is None:
        return {f"{name}/{time}": value}
    return {f"{name}.{i}/{time}": value.take(i, dim) for i in range(layers)}


def _factor(key: str, factors: dict[str, np.ndarray]) -> np.ndarray:
    name, _, layer = key.partition(".")
    return factors[name][int(layer or 0)]


def _error(key: str, errors: dict[str, np.ndarray], replica: int) -> np.ndarray:
    name, _, layer = key.partition(".")
    return errors[name][replica][int(layer)] if layer else errors[name][replica]
