"""Gradients of one global batch: at once, or over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh.rules import BATCH, REPLICAS
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.models.define import Definition, Tree
from jaxtrain.train.loss import checked, scales, total

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Gradients:
    """(params, batch, key) -> (gradients, sums of the loss terms, their weights).

    Every array of the batch has a leading dim of global_batch rows. Gradients have the dtype and the place of the train
    state, and are of the sum over terms of sum / weight, times `loss_scale`.

    With microbatches (`accumulate` > 1) and replicas that keep whole gradients (ZeRO 0 and 1), every replica adds
    up its own gradients and they are reduced once, at the end; else each microbatch's are reduced as they come.
    `local` is the definition on one slice of the replicas' axis, for that.
    """

    definition: Definition
    sharder: Sharder
    accumulate: int = 1
    local: Definition | None = None

    def __call__(
        self, params: Tree, batch: Batch, key: jax.Array, loss_scale: jax.Array | float = 1.0
    ) -> tuple[Tree, Sums, Sums]:
        if self.accumulate > 1:
            return self._over_microbatches(params, batch, key, loss_scale)

        def loss(params: Tree) -> tuple[jax.Array, tuple[Sums, Sums]]:
            terms = checked(self.definition.bind(self._ready(params)).loss(batch, key))
            sums, weights = _split(terms)
            return loss_scale * total(terms, scales(weights)), (sums, weights)

        grads, (sums, weights) = jax.grad(loss, has_aux=True)(params)
        return self._kept(grads), sums, weights

    def _over_microbatches(
        self, params: Tree, batch: Batch, key: jax.Array, loss_scale: Any
    ) -> tuple[Tree, Sums, Sums]:
        """Terms are normalised by their weight over the *global* batch, so a first pass adds up the weights.

        They do not depend on activations: the compiler drops all of the forward pass from it but the counting.
        """
        micro = jax.tree.map(lambda x: microbatches(self.sharder, x, self.accumulate), dict(batch))
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(self.accumulate))
        ready = self._ready(params)

        def weigh(_: None, inputs: tuple[Batch, jax.Array]) -> tuple[None, Sums]:
            return None, _split(checked(self.definition.bind(ready).loss(*inputs)))[1]

        weights = jax.tree.map(lambda w: w.sum(0), jax.lax.scan(weigh, None, (micro, keys))[1])
        scale = {name: loss_scale * value for name, value in scales(weights).items()}
        first = jax.tree.map(lambda x: x[0], micro)
        add_up = self._each
        if self.local is not None and not draws(self.definition, ready, first, key):
            add_up = partial(self._once, self.local)
        grads, sums = add_up(ready, micro, keys, scale)
        return grads, jax.tree.map(lambda s: s.sum(0), sums), weights

    def _each(self, ready: Tree, micro: Batch, keys: jax.Array, scale: Sums) -> tuple[Tree, Sums]:
        """Every microbatch's gradients reduced into the train state's shards as they come; sums of each."""
        return _added_up(self.definition, self._kept, ready, micro, keys, scale)

    def _once(self, local: Definition, ready: Tree, micro: Batch, keys: jax.Array, scale: Sums) -> tuple[Tree, Sums]:
        """Every replica's gradients added up by itself, [replicas, ...], and reduced after the last microbatch.

        A shard_map over the replicas, because a vmap would take kernels through their batching rules, which cuDNN's
        attention does not have for packed documents, and both branches of every conditional.
        """
        inner = self.sharder.without(REPLICAS)

        def placed(grads: Tree) -> Tree:
            return jax.tree.map(lambda g, names: inner.place(g, inner.stored(names, g.shape)), grads, local.names)

        def own(*args: Any) -> tuple[Tree, Sums]:
            return jax.tree.map(lambda x: x[None], _added_up(local, placed, *args))

        def reduced(g: jax.Array, dtype: Any) -> Any:
            # lax.reduce, because jnp.sum would widen what travels to float32.
            return jax.lax.reduce(g.astype(dtype), jnp.zeros((), dtype), jax.lax.add, (0,))

        specs = (P(), P(None, REPLICAS), P(), P())
        grads, sums = self.sharder.map(own, specs, P(REPLICAS), axes=(REPLICAS,))(ready, micro, keys, scale)
        grads = self._kept(jax.tree.map(reduced, grads, self.definition.travels))
        return grads, jax.tree.map(lambda s: s.sum(0), sums)

    def _ready(self, params: Tree) -> Tree:
        """The train state's parameters where the model expects them, gathered over the replicas where it must."""
        return jax.tree.map(self.sharder.gathered, params, self.definition.names, self.definition.travels)

    def _kept(self, grads: Tree) -> Tree:
        """Gradients placed in the train state's shards; widened after they travelled."""

        def keep(g: jax.Array, names: Any, p: Any) -> jax.Array:
            return self.sharder.place(g, self.sharder.stored(names, g.shape)).astype(
                jnp.promote_types(g.dtype, p.dtype)
            )

        return jax.tree.map(keep, grads, self.definition.names, self.definition.params)


def _added_up(
    definition: Definition, placed: Callable[[Tree], Tree], ready: Tree, micro: Batch, keys: jax.Array, scale: Sums
) -> tuple[Tree, Sums]:
    """Float32 gradients of all microbatches, `placed` after each; the sums of every one's terms [microbatches]."""

    def add(grads: Tree, inputs: tuple[Batch, jax.Array]) -> tuple[Tree, Sums]:
        more, sums = jax.grad(_loss, argnums=1, has_aux=True)(definition, ready, *inputs, scale)
        return placed(jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, placed(more))), sums

    zeros = placed(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), ready))
    return jax.lax.scan(add, zeros, (micro, keys))


def _loss(definition: Definition, ready: Tree, batch: Batch, key: jax.Array, scale: Sums) -> tuple[jax.Array, Sums]:
    """A microbatch's part of the loss, and the sums of its terms."""
    terms = checked(definition.bind(ready).loss(batch, key))
    return total(terms, scale), _split(terms)[0]


def _split(terms: Mapping) -> tuple[Sums, Sums]:
    return {k: v[0] for k, v in terms.items()}, {k: jax.lax.stop_gradient(v[1]) for k, v in terms.items()}


def microbatches(sharder: Sharder, x: jax.Array, count: int) -> jax.Array:
    """[B, ...] -> [count, B / count, ...]; microbatch i has rows i, i + count, ..., so that no row changes device."""
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
    return sharder.lead(x, ((), sharder.axes(BATCH)))


def draws(definition: Definition, params: Tree, batch: Batch, key: jax.Array) -> bool:
    """Whether the model's loss uses its random key: its numbers then depend on which rows it sees at once."""
    traced = jax.make_jaxpr(lambda key: definition.bind(params).loss(batch, key))(key)
    (given,) = traced.jaxpr.invars
    return any(given in eqn.invars for eqn in traced.jaxpr.eqns)
