"""Gradients of one global batch: at once, or over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.losses.terms import parted, scales, total
from jaxtrain.models.definition import Definition, Tree
from jaxtrain.nn.param import Apart, apart, stand_in, widened
from jaxtrain.pipeline.executor import Executor, Run
from jaxtrain.pipeline.stage import StepInputs
from jaxtrain.sharding.rules import BATCH, LAYERS, REPLICAS
from jaxtrain.sharding.sharder import Sharder

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


class GradOutput(NamedTuple):
    """grads: tree like the parameters. sums, weights: of each loss term. counts: see `loss.parted`, or None."""

    grads: Tree
    sums: Sums
    weights: Sums
    counts: Any


@dataclass(frozen=True, eq=False)
class Gradients:
    """(params, batch, key) -> gradients, loss terms and counts.

    Every array of the batch has a leading dim of global_batch rows. Gradients have the dtype and the place of the train
    state, and are of the sum over terms of sum / weight, times `loss_scale`.

    With microbatches (`accumulate` > 1) and replicas that keep whole gradients (ZeRO 0 and 1), every replica adds
    up its own gradients and they are reduced once, at the end; else each microbatch's are reduced as they come.
    `local` is the definition on one slice of the replicas' axis, for that.

    `pipeline` and `local_pipeline` run the schedule of pipeline stages, which then is the loop over microbatches.
    """

    definition: Definition
    sharder: Sharder
    accumulate: int = 1
    local: Definition | None = None
    pipeline: Executor | None = None
    local_pipeline: Executor | None = None

    def __call__(self, params: Tree, batch: Batch, key: jax.Array, loss_scale: jax.Array | float = 1.0) -> GradOutput:
        if not self.at_once:
            return self._over_microbatches(params, batch, key, loss_scale)

        def loss(stand_ins: Tree) -> tuple[jax.Array, tuple[Sums, Sums, Any]]:
            terms, counts = parted(self.definition.bind(self._ready(apart(stand_ins, params))).loss(batch, key))
            sums, weights = _split(terms)
            return loss_scale * total(terms, scales(weights)), (sums, weights, counts)

        grads, rest = jax.grad(loss, has_aux=True)(self.stand_ins(params))
        return GradOutput(self._kept(grads), *rest)

    @property
    def at_once(self) -> bool:
        """True if there is one microbatch, so that gradients need not be added up."""
        return self.accumulate == 1 and self.pipeline is None

    def stand_ins(self, params: Tree) -> Tree:
        """Returns proxies to differentiate by: gradients of stacked layers stay in their communication dtype, and are
        widened where they are read. What is gathered over the replicas has narrow gradients as it is.
        """

        def one(p: jax.Array, names: Any, travels: Any) -> jax.Array:
            is_here = self.sharder.stored(names, p.shape) == self.sharder.placed(names, p.shape)
            return stand_in(p, travels) if is_here and names[:1] == (LAYERS,) else p

        return jax.tree.map(one, params, self.definition.names, self.definition.travels)

    def _over_microbatches(self, params: Tree, batch: Batch, key: jax.Array, loss_scale: Any) -> GradOutput:
        """Terms are normalised by their weight over the *global* batch, so a first pass adds up the weights.

        They do not depend on activations: the compiler drops all of the forward pass from it but the counting.
        What else a term must know of the global batch is added up by `statistics`.
        """
        micro = jax.tree.map(lambda x: microbatches(self.sharder, x, self.accumulate), dict(batch))
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(self.accumulate))
        ready = self._ready(params)

        weights = weigh(self.definition, ready, micro, keys)
        known = statistics(self.definition, ready, micro, keys, self.pipeline)
        scale = {name: loss_scale * value for name, value in scales(weights).items()}
        first = jax.tree.map(lambda x: x[0], micro)
        once = self.local is not None and not draws(self.definition, ready, first, key)
        model = (self.local, self.local_pipeline) if once else (self.definition, self.pipeline)
        part = _MicrobatchLoss(*model, ready, scale, known)
        # Reduced once a step, or every microbatch's gradients into the train state's shards as they come.
        grads, rest = self._once(part, micro, keys) if once else part.added_up(micro, keys, self._kept)
        sums, counts = rest
        return GradOutput(grads, sums, weights, counts)

    def _once(self, part: _MicrobatchLoss, micro: Batch, keys: jax.Array) -> tuple[Tree, Any]:
        """Every replica's gradients added up by itself, [replicas, ...], and reduced after the last microbatch.

        A shard_map over the replicas, because a vmap would take kernels through their batching rules, which cuDNN's
        attention does not have for packed documents, and both branches of every conditional.
        """
        inner = self.sharder.without(REPLICAS)

        def placed(grads: Tree) -> Tree:
            names = self.definition.names
            return jax.tree.map(lambda g, names: inner.place(g, inner.stored(names, g.shape)), grads, names)

        def own(given: tuple, micro: Batch, keys: jax.Array) -> tuple[Tree, Any]:
            return jax.tree.map(
                lambda x: x[None], _MicrobatchLoss(part.definition, part.pipeline, *given).added_up(micro, keys, placed)
            )

        def reduced(g: jax.Array, dtype: Any) -> Any:
            # lax.reduce, because jnp.sum would widen what travels to float32.
            return jax.lax.reduce(g.astype(dtype), jnp.zeros((), dtype), jax.lax.add, (0,))

        run = self.sharder.map(own, (P(), P(None, REPLICAS), P()), P(REPLICAS), axes=(REPLICAS,))
        grads, rest = run((part.ready, part.scale, part.known), micro, keys)
        return self._kept(jax.tree.map(reduced, grads, self.definition.travels)), summed(rest)

    def _ready(self, params: Tree) -> Tree:
        """The train state's parameters where the model expects them, gathered over the replicas where it must."""

        def ready(p: Any, names: Any, travels: Any) -> Any:
            return p if isinstance(p, Apart) else self.sharder.gathered(p, names, travels)

        is_leaf = lambda p: isinstance(p, Apart)  # noqa: E731
        return jax.tree.map(ready, params, self.definition.names, self.definition.travels, is_leaf=is_leaf)

    def _kept(self, grads: Tree) -> Tree:
        """Gradients placed in the train state's shards; widened after they travelled."""

        def keep(g: jax.Array, names: Any, p: Any) -> jax.Array:
            g = self.sharder.place(g, self.sharder.stored(names, g.shape))
            return g.astype(jnp.promote_types(g.dtype, p.dtype))

        return jax.tree.map(keep, grads, self.definition.names, self.definition.params)


@dataclass(frozen=True, eq=False)
class _MicrobatchLoss:
    """A microbatch's part of the loss: what is the same for all of them."""

    definition: Any
    pipeline: Executor | None
    ready: Tree
    scale: Sums
    known: Batch

    def add(self, batch: Batch, key: jax.Array, sums: Tree) -> tuple[Sums, Any]:
        """Adds gradients of the ready parameters to a tree of float32 Refs; sums of terms and counts.

        In place, layer by layer, as the backward pass makes them.
        """

        def loss(wide: Tree) -> tuple[jax.Array, tuple[Sums, Any]]:
            terms, counts = parted(self.definition.bind(apart(wide, self.ready)).loss({**batch, **self.known}, key))
            return total(terms, self.scale), (_split(terms)[0], counts)

        value, pull, rest = jax.vjp(loss, widened(self.ready), has_aux=True)
        pull.with_refs(sums)(jnp.ones_like(value))
        return rest

    def added_up(self, micro: Batch, keys: jax.Array, placed: Callable[[Tree], Tree]) -> tuple[Tree, tuple[Sums, Any]]:
        """Float32 gradients of all microbatches, `placed`; all sums and counts."""
        if self.pipeline:
            return Run(self.pipeline, self.ready, StepInputs(micro, keys, self.scale, self.known)).gradients(placed)
        sums = jax.tree.map(jax.new_ref, placed(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.ready)))
        _, rest = jax.lax.scan(lambda _, inputs: (None, self.add(*inputs, sums)), None, (micro, keys))
        return placed(jax.tree.map(jax.freeze, sums)), summed(rest)


def weigh(definition: Definition, params: Tree, micro: Batch, keys: jax.Array) -> Sums:
    """Weights of all terms over all microbatches; the compiler drops all else that this computes."""

    def part(_: None, inputs: tuple[Batch, jax.Array]) -> tuple[None, Sums]:
        return None, _split(parted(definition.bind(params).loss(*inputs))[0])[1]

    return summed(jax.lax.scan(part, None, (micro, keys))[1])


def statistics(
    definition: Definition, params: Tree, micro: Batch, keys: jax.Array, pipeline: Executor | None = None
) -> Batch:
    """Sums the statistics that terms need of the whole batch over its microbatches; `loss` gets them with each.

    A model may have a method `statistics(batch, key)`: a pytree of sums over rows, which takes a forward pass of its
    own, or None. `loss` finds them as `batch["statistics"]`; in a batch that is not cut it finds none, and its own sums
    are the same. Pipeline stages make them of their layers' counts: `statistics_of(counts)`.
    """

    def part(_: None, inputs: tuple[Batch, jax.Array]) -> tuple[None, Any]:
        return None, getattr(definition.bind(params), "statistics", lambda *_: None)(*inputs)

    if pipeline and jax.eval_shape(lambda: part(None, jax.tree.map(lambda x: x[0], (micro, keys))))[1] is not None:
        counts = Run(pipeline.forward, params, StepInputs(micro, keys, {}, {})).sums(finish=False)[1]
        return {"statistics": definition.bind(params).statistics_of(counts)}
    found = summed(jax.lax.scan(part, None, (micro, keys))[1])
    return {} if found is None else {"statistics": found}


def summed(tree: Any) -> Any:
    """Every leaf summed over its first dim, that of the microbatches."""
    return jax.tree.map(lambda x: x.sum(0), tree)


def _split(terms: Mapping) -> tuple[Sums, Sums]:
    return {k: v[0] for k, v in terms.items()}, {k: jax.lax.stop_gradient(v[1]) for k, v in terms.items()}


def microbatches(sharder: Sharder, x: jax.Array, count: int) -> jax.Array:
    """[B, ...] -> [count, B / count, ...]; microbatch i has rows i, i + count, ..., so that no row changes device."""
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
    return sharder.lead(x, ((), sharder.axes(BATCH)))


def draws(definition: Definition, params: Tree, batch: Batch, key: jax.Array) -> bool:
    """Returns whether the model's loss uses its random key: its numbers then depend on which rows it sees at once."""
    traced = jax.make_jaxpr(lambda key: definition.bind(params).loss(batch, key))(key)
    (given,) = traced.jaxpr.invars
    return any(given in eqn.invars for eqn in traced.jaxpr.eqns)
