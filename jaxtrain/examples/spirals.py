"""Example of a custom model and data: classifies points of two spirals. See configs/recipes/spirals.yaml."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.nn.env import constant, normal
from jaxtrain.nn.stack import scan, stacked


class Points:
    """Data with batches of points `xy` [rows, 2] and the spiral `label` [rows] (0 or 1) of each."""

    def __init__(self, split, seed, global_batch, noise=0.05):
        self.seed = [seed, ("train", "validation").index(split)]
        self.global_batch, self.noise = global_batch, noise

    def batch(self, step, rows=None):
        """Returns rows of a batch, as a pure function of its arguments.

        Each row has its own generator, so any host can read any rows.
        """
        indices = np.arange(self.global_batch)[slice(None) if rows is None else rows]
        seeds = [[*self.seed, step * self.global_batch + int(index)] for index in indices]
        draws = np.stack([np.random.default_rng(seed).normal(size=4) for seed in seeds])
        label = (draws[:, 0] > 0).astype(np.int32)
        turn = 3 * np.pi * np.abs(np.tanh(draws[:, 1])) ** 0.5
        angle = turn + np.pi * label
        xy = turn[:, None] / 8 * np.stack([np.cos(angle), np.sin(angle)], 1) + self.noise * draws[:, 2:]
        return {"xy": xy.astype(np.float32), "label": label}


class Layer(nnx.Module):
    """Residual block x + down(gelu(up(x))): `up` is column-parallel, `down` row-parallel if a layout shards `mlp`."""

    def __init__(self, embed, mlp, *, env, rngs):
        self.env = env
        self.up = env.param(rngs, ("embed", "mlp"), (embed, mlp), normal(embed**-0.5))
        self.down = env.param(rngs, ("mlp", "embed"), (mlp, embed), normal(0.5 * mlp**-0.5))

    def __call__(self, x_BD):
        hidden_BF = self.env.constrain(jax.nn.gelu(x_BD @ self.env.weight(self.up)), "batch", "mlp")
        return x_BD + self.env.constrain(hidden_BF @ self.env.weight(self.down), "batch", None)


class Classifier(nnx.Module):
    """Residual network. `loss` returns terms as (sum, weight); jaxtrain does the rest."""

    def __init__(self, embed, mlp, layers, *, env, rngs):
        self.env = env
        self.read = env.param(rngs, (None, "embed"), (2, embed), normal(1.0))
        self.layers = stacked(lambda rngs: Layer(embed, mlp, env=env, rngs=rngs), layers, rngs)
        self.write = env.param(rngs, ("embed",), (embed,), constant(0.0))

    def loss(self, batch, key):
        x_BD = self.env.constrain(jnp.sin(batch["xy"] @ self.env.weight(self.read)), "batch", None)
        x_BD, _ = scan(self.layers, lambda layer, x, _, index: (layer(x), None), x_BD, env=self.env)
        score_B = (x_BD @ self.env.weight(self.write)).astype(jnp.float32)
        sign_B = 2.0 * batch["label"] - 1.0
        return {"log_loss": (jnp.sum(jax.nn.softplus(-sign_B * score_B)), jnp.float32(len(sign_B)))}
