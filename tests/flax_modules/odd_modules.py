"""Modules with a mistake, each of its own kind, and one with a dtype of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Base(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(48, 16, rngs=rngs)

    def outputs(self, batch):
        return self.linear(batch["image"].reshape(len(batch["image"]), -1))


class WrongLoss(Base):
    def loss(self, batch):
        return self.outputs(batch)


class TextLoss(Base):
    def loss(self, batch):
        return "loss"


class NoLoss(Base):
    pass


class Colliding(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "embed"))
        self.linear = nnx.Linear(48, 16, kernel_init=init, rngs=rngs)

    def loss(self, batch):
        return 0.0


class TooManyNames(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((16,)), out_sharding=("embed", "mlp"))

    def loss(self, batch):
        return 0.0


class GrowingState(Base):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros((1,)))

    def loss(self, batch):
        self.seen.set_value(jnp.zeros((2,)))
        return jnp.mean(self.outputs(batch))


class AssigningLoss(Base):
    def loss(self, batch):
        self.linear.kernel[...] = self.linear.kernel[...] * 0.9
        return jnp.mean(self.outputs(batch))


class ArrayCounts(Base):
    def loss(self, batch):
        return jnp.mean(self.outputs(batch)), {"histogram": jnp.ones((4,))}


class NamedAttributes(Base):
    """Attributes of any name are the user's."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.method, self.signature = "mean", "none"

    def loss(self, batch):
        return jnp.mean(self.outputs(batch))


class NoRngs(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))


def make_nothing(*, rngs: nnx.Rngs):
    return None


class OwnDtype(nnx.Module):
    """The head computes in float32 in every precision."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.body = nnx.Linear(48, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 4, dtype=jnp.float32, rngs=rngs)

    def loss(self, batch):
        hidden = self.norm(self.body(batch["image"].reshape(len(batch["image"]), -1)))
        return jnp.mean(jax.nn.logsumexp(self.head(hidden), -1))
