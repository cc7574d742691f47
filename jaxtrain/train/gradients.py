"""Gradients of one global batch: at once, or over microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

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
        once = self.local is not None and not draws(self.definition, ready, first, key)
        add, zeros, finish = (self._once if once else self._each)(params, ready, scale)
        grads, sums = jax.lax.scan(add, zeros, (micro, keys))
        return finish(grads), jax.tree.map(lambda s: s.sum(0), sums), weights

    def _each(self, params: Tree, ready: Tree, scale: Sums) -> tuple[Any, Tree, Any]:
        """Every microbatch's gradients reduced into the train state's shards."""

        def add(grads: Tree, inputs: tuple[Batch, jax.Array]) -> tuple[Tree, Sums]:
            more, sums = jax.grad(_loss, argnums=1, has_aux=True)(self.definition, ready, *inputs, scale)
            return self._kept(jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, self._kept(more))), sums

        zeros = self._kept(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
        return add, zeros, lambda grads: grads

    def _once(self, params: Tree, ready: Tree, scale: Sums) -> tuple[Any, Tree, Any]:
        """Every replica's gradients added up by itself, [replicas, ...], and reduced after the last microbatch."""
        local, mesh = self.local, self.sharder.mesh
        assert local is not None
        assert mesh is not None
        count = mesh.shape[REPLICAS]
        rest = tuple(axis for axis in self.sharder.axes(BATCH) if axis != REPLICAS)

        def own(x: jax.Array) -> jax.Array:
            return self.sharder.lead(x.reshape(count, -1, *x.shape[1:]), ((REPLICAS,), rest))

        def placed(grads: Tree) -> Tree:
            inner = self.sharder.without(REPLICAS)
            return jax.tree.map(
                lambda g, names: self.sharder.place(g, ((REPLICAS,), *inner.stored(names, g.shape[1:]))),
                grads, self.definition.names,
            )  # fmt: skip

        def gradient(batch: Batch, key: jax.Array) -> tuple[Tree, Sums]:
            return jax.grad(_loss, argnums=1, has_aux=True)(local, ready, batch, key, scale)

        def add(grads: Tree, inputs: tuple[Batch, jax.Array]) -> tuple[Tree, Sums]:
            batch, key = inputs
            run = jax.vmap(gradient, in_axes=(0, None), spmd_axis_name=REPLICAS)
            more, sums = run(jax.tree.map(own, batch), key)
            grads = jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, placed(more))
            return placed(grads), jax.tree.map(lambda s: s.sum(0), sums)

        def finish(grads: Tree) -> Tree:
            # lax.reduce, because jnp.sum would widen what travels to float32.
            def reduced(g: jax.Array, dtype: Any) -> jax.Array:
                return jax.lax.reduce(g.astype(dtype), jnp.zeros((), dtype), jax.lax.add, (0,))

            return self._kept(jax.tree.map(reduced, grads, self.definition.travels))

        zeros = placed(jax.tree.map(lambda p: jnp.zeros((count, *p.shape), jnp.float32), params))
        return add, zeros, finish

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
