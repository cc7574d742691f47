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


class NothingLoss(Base):
    def loss(self, batch):
        self.outputs(batch)


class EmptyLoss(Base):
    def loss(self, batch):
        return {}


class ListLoss(Base):
    def loss(self, batch):
        return [jnp.mean(self.outputs(batch))]


class RowsLoss(Base):
    """Forgets to sum over the rows."""

    def loss(self, batch):
        rows = jnp.mean(self.outputs(batch), -1)
        return {"rows": (rows, jnp.ones(len(rows)))}


class ComplexLoss(Base):
    def loss(self, batch):
        return jnp.mean(self.outputs(batch)) * 1j


class NumberedTerms(Base):
    def loss(self, batch):
        return {1: jnp.mean(self.outputs(batch)), 2: 0.0}


class ManyArguments(Base):
    def loss(self, batch, key, more):
        return jnp.mean(self.outputs(batch))


class KeywordKey(Base):
    def loss(self, batch, *, key):
        return jnp.mean(self.outputs(batch) + jax.random.normal(key, (16,)))


class TwoOfOnePath(Base):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        setattr(self, "linear/kernel", nnx.Param(jnp.ones((3,))))

    def loss(self, batch):
        return jnp.mean(self.outputs(batch))


class FloatCount(Base):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def loss(self, batch):
        self.seen.set_value(self.seen[...] + 0.5)
        return jnp.mean(self.outputs(batch))


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


class NumberNames(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((16,)), out_sharding=(3,))

    def loss(self, batch):
        return 0.0


class OneTextAsNames(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((16,)), out_sharding="embed")

    def loss(self, batch):
        return 0.0


class VanishingState(Base):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros((1,)))

    def loss(self, batch):
        del self.seen
        return jnp.mean(self.outputs(batch))


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


TABLE = jnp.arange(16.0)  # allocated when this module is imported


class ReadsGlobal(Base):
    """An array of the Python module is a constant of the loss."""

    def loss(self, batch):
        return jnp.mean((self.outputs(batch) * self.table()) ** 2)

    def table(self):
        return TABLE


class ReadsNothing(ReadsGlobal):
    """`ReadsGlobal` without its global."""

    def table(self):
        return jnp.arange(16.0)


KEPT: list[jax.Array] = []


class KeepsOutputs(Base):
    """A list of the Python module, and an attribute, get arrays of every pass; none is read again."""

    def loss(self, batch):
        outputs = self.outputs(batch)
        KEPT.append(outputs)
        self.latest = outputs
        return jnp.mean(outputs**2)


class ReadsKept(Base):
    """Adds the losses of all passes that were traced."""

    def loss(self, batch):
        KEPT.append(jnp.mean(self.outputs(batch) ** 2))
        return sum(KEPT)


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


class TakenTerm(Base):
    def loss(self, batch):
        return {"grad_norm": jnp.mean(self.linear(batch["image"].reshape(-1, 48)))}


class TakenMetric(Base):
    def loss(self, batch):
        mean = jnp.mean(self.linear(batch["image"].reshape(-1, 48)))
        return {"size": mean}, {"size": mean}


class TakenLoss(Base):
    def loss(self, batch):
        mean = jnp.mean(self.linear(batch["image"].reshape(-1, 48)))
        return {"loss": mean, "size": mean}
