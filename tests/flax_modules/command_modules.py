"""Models and data for the tests of commands and of dtypes."""

import conformance
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx


class NanLoss(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(48, 4, rngs=rngs)

    def loss(self, batch):
        outputs = self.linear(batch["image"].reshape(-1, 48))
        return {"nats": (jnp.sum(jnp.log(-jnp.abs(outputs))), jnp.float32(len(outputs)))}


class NotHere:
    """Data that is on another machine; a static method tells the shapes of its batches."""

    def __init__(self, split, seed, global_batch):
        raise FileNotFoundError("/elsewhere")

    @staticmethod
    def example():
        return conformance.batch(0, slice(0, 1))


class Bigrams(nn.Module):
    """A Linen model of text."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(512)(nn.Embed(512, 16)(tokens))


def cross_entropy(model, batch, key):
    nats = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return {"cross_entropy": (jnp.sum(nats * batch["weights"]), jnp.sum(batch["weights"]))}


class LinenOwnDtype(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dtype=jnp.float32, use_bias=False, name="exact")(x.reshape(len(x), -1))

    def loss(self, batch):
        outputs = self(batch["image"])
        return {"outputs": (jnp.sum(outputs**2), jnp.float32(len(outputs)))}
