"""A network of two matrices with logical names, and rows of uneven weights, for the tests of synchronisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.schema import Config
from jaxtrain.core.placement import Placer
from jaxtrain.core.program import Program, build_program

ROWS, WIDTH, HIDDEN = 16, 4, 8
RULES = {"batch": ["data", "fsdp"], "embed": "fsdp", "mlp": "model"}
LAYOUTS = {"fsdp": {"fsdp": 2}, "tp": {"model": 2}}
OVER_DATA: dict[str, dict[str, Any]] = {  # changes of a config; there is one replica, and gradients travel over `data`
    "data_fsdp": {"mesh": {"fsdp": 2}}, "data_tp": {"mesh": {"model": 2}}, "zero1": {"mesh": {"fsdp": 2}, "zero": 1},
}  # fmt: skip


def normal(key, shape, dtype=jnp.float32):
    return jax.random.normal(key, shape, dtype) * 0.5


class Net(nnx.Module):
    """y ~ tanh(x a) b, with noise on the inputs if `noise` is not 0."""

    rows_are_independent = True

    def __init__(self, *, env, rngs, noise: float = 0.0):
        self.env, self.noise = env, noise
        self.a = env.param(rngs, ("embed", "mlp"), (WIDTH, HIDDEN), normal)
        self.b = env.param(rngs, ("mlp", "embed"), (HIDDEN, WIDTH), normal)

    def loss(self, batch, key):
        x = batch["x"] + self.noise * jax.random.normal(key, batch["x"].shape)
        error = jnp.tanh(x @ self.env.weight(self.a)) @ self.env.weight(self.b) - batch["y"]
        return {"square": (jnp.sum(batch["w"][:, None] * error**2), jnp.sum(batch["w"]))}


class Left(nnx.Module):
    """y ~ b tanh(a x): the gradient of a weight on the left of its product is no transposed product.

    XLA turns a transposed product around, unless there is an all-reduce before the transposition. On processors without
    AVX-512 it then rounds in another way, so that programs with and without replicas would differ in the last bit.
    """

    rows_are_independent = True

    def __init__(self, *, env, rngs):
        self.env = env
        self.a = env.param(rngs, ("mlp", "embed"), (HIDDEN, WIDTH), normal)
        self.b = env.param(rngs, ("embed", "mlp"), (WIDTH, HIDDEN), normal)

    def loss(self, batch, key):
        hidden = jnp.tanh(self.env.weight(self.a) @ batch["x"].T)
        error = (self.env.weight(self.b) @ hidden).T - batch["y"]
        return {"square": (jnp.sum(batch["w"][:, None] * error**2), jnp.sum(batch["w"]))}


class Wide(nnx.Module):
    """y ~ tanh(tanh(x a) m) b, with a matrix that is worth rounding between two that are not."""

    rows_are_independent = True
    inside = 64

    def __init__(self, *, env, rngs):
        self.env = env
        self.a = env.param(rngs, ("embed", "mlp"), (WIDTH, self.inside), normal)
        self.m = env.param(rngs, ("embed", "mlp"), (self.inside, self.inside), normal)
        self.b = env.param(rngs, ("mlp", "embed"), (self.inside, WIDTH), normal)

    def loss(self, batch, key):
        x = batch["x"]
        for weight in (self.a, self.m):
            x = jnp.tanh(x @ self.env.weight(weight))
        error = 0.1 * (x @ self.env.weight(self.b)) - batch["y"]
        return {"square": (jnp.sum(batch["w"][:, None] * error**2), jnp.sum(batch["w"]))}


def rows(step: int, equal: int = 1, weights: str = "even", total: int = ROWS) -> dict[str, np.ndarray]:
    """Rows of a step. `equal`: the same rows that many times. Weights are 1, or small integers that differ."""
    rng = np.random.default_rng(step)
    count = total // equal
    x = rng.normal(size=(count, WIDTH)).astype(np.float32)
    w = rng.integers(1, 9, size=count) if weights == "uneven" else np.ones(count)
    batch = {"x": x, "y": np.sin(3 * x).astype(np.float32), "w": w.astype(np.float32)}
    return {name: np.concatenate([value] * equal) for name, value in batch.items()}


def config(**changes: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"type": "tiny_net:Net"}, "precision": "fp32", "steps": 12, "rules": RULES,
        "data": {"type": "tiny_net:Rows", "global_batch": ROWS}, "schedule": {"name": "constant"},
        "optimizer": {"name": "sgd", "lr": 0.05, "betas": [0.0, 0.9], "weight_decay": 0.0, "grad_clip_norm": None},
    }  # fmt: skip
    return Config(**{k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in (base | changes).items()})


def program(mesh: dict[str, int], example: Any = None, **changes: Any) -> Program:
    """On as many simulated devices as the mesh has places."""
    cfg = config(mesh=mesh, **changes)
    return build_program(cfg, None, jax.devices()[: int(np.prod(list(mesh.values()) or [1]))], example or rows(0))


def replicas(count: int, layout: str, **changes: Any) -> Program:
    """Several replicas, each on a layout; or as many places of `data`."""
    if layout in LAYOUTS:
        return program({"replica": count, **LAYOUTS[layout]}, **changes)
    return program(**{**OVER_DATA[layout], "mesh": {"data": count, **OVER_DATA[layout]["mesh"]}, **changes})


def with_one_key(program: Program) -> Any:
    """The state of step 0, with the random key of replica 0 for all."""
    state = program.init()
    return state | {"rng": jax.device_put(jax.numpy.broadcast_to(state["rng"][:1], state["rng"].shape))}


def run(program: Program, steps: int, state: Any = None, first: int = 0, **batches: Any) -> tuple[Any, list[dict]]:
    """The last state, and of every step the metrics and the parameters on the host."""
    state, history = program.init() if state is None else state, []
    for step in range(first, first + steps):
        fetch = lambda step, index: {n: v[index] for n, v in rows(step, **batches).items()}  # noqa: E731
        batch = Placer(fetch, program.sharder, len(fetch(0, slice(None))["x"]), False)(step)
        state, metrics = program.step_at(step)(state, batch)
        host = jax.device_get((metrics, state["params"], program.agreed(state)["params"]))
        history.append({"metrics": host[0], "params": host[1], "agreed": host[2]})
    return state, history


class Rows:
    """The rows of `rows`, as a config names them."""

    def __init__(self, split: str, seed: int, global_batch: int, weights: str = "even") -> None:
        self.first, self.weights = (0 if split == "train" else 1000), weights

    @staticmethod
    def example() -> dict[str, np.ndarray]:
        return rows(0)

    def batch(self, step: int, rows_of: Any = slice(None)) -> dict[str, np.ndarray]:
        return {name: value[rows_of] for name, value in rows(self.first + step, weights=self.weights).items()}
