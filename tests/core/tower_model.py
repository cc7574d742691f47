"""A user's own model that is no language model and runs in pipeline stages: a tower of layers on vectors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.nn.env import normal
from jaxtrain.nn.stack import scan, stacked


class Layer(nnx.Module):
    def __init__(self, size, *, env, rngs):
        self.w = env.param(rngs, ("embed", "mlp"), (size, size), normal(0.3))


class Tower(nnx.Module):
    """Squares of the last layer's distance from y, and a term of the layers themselves; tied first and last weights."""

    def __init__(self, size: int, layers: int, *, env, rngs):
        self.env = env
        self.ends = env.param(rngs, (None, "embed"), (size, size), normal(0.5))
        self.layers = stacked(lambda rngs: Layer(size, env=env, rngs=rngs), layers, rngs)

    def loss(self, batch, key):
        x, terms, counts = self.run_layers(self.embed_inputs(batch, key), batch, key)
        return self.head_loss(x, batch, key) | terms, counts

    def embed_inputs(self, batch, key):
        return {"x": batch["x"] @ self.env.weight(self.ends), "steps": jnp.zeros(batch["y"].shape)}

    def run_layers(self, state, batch, key, layers=None):
        def step(layer, state, _, index):
            x = state["x"] + jnp.tanh(state["x"] @ self.env.weight(layer.w)) * batch["count"][:, None]
            return {"x": x, "steps": state["steps"] + 1}, jnp.sum(x**2)

        state, squares = scan(self.layers, step, state, env=self.env, layers=layers)
        terms = {"size": (1e-3 * jnp.sum(squares), jnp.sum(batch["count"]))}
        return state, terms, {"squares": squares}

    def head_loss(self, state, batch, key):
        error = (state["x"] @ self.env.weight(self.ends)).sum(-1) / state["steps"] - batch["y"]
        return {"square": (jnp.sum(batch["count"] * error**2), jnp.sum(batch["count"]))}

    def metrics(self, counts):
        return {"largest": jnp.max(counts["squares"])}


class Heedless(Tower):
    """Takes all that it is given for layers."""

    def run_layers(self, state, batch, key, layers=None):
        return super().run_layers(state, batch, key)


def batch(rows: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(rows, size)), rng.normal(size=rows)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "count": np.linspace(0.1, 1, rows, dtype=np.float32)}
