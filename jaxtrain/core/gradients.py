"""Gradients of one global batch: in one pass, or accumulated over microbatches; or of each replica apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.losses.terms import Terms, scales, total
from jaxtrain.models.model_def import NOTHING, ModelDef, NonTrainable, Tree
from jaxtrain.nn.param import SplitGrad, attach_grad_proxies, float32_grad_proxies, grad_proxy
from jaxtrain.pipeline.executor import Executor, PipelineStep
from jaxtrain.pipeline.stage import StepInputs
from jaxtrain.sharding.rules import BATCH, DATA_AXIS, LAYERS
from jaxtrain.sharding.sharder import Sharder
from jaxtrain.sync.compression.onebit_adam import Momenta
from jaxtrain.sync.local_step import SYNC
from jaxtrain.sync.replica_dim import average, choose, key_of_replica, shares
from jaxtrain.sync.strategy import Strategy

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


class GradOutput(NamedTuple):
    """Gradients like the parameters; sum and weight of each loss term; counts (see `split_loss_output`) or None.

    `mutable` are the model's mutable variables after the pass. `tokens` are those of each replica, the largest weight
    of a term, if replicas compute gradients apart: gradients then have a leading replica dim, and their mean is that of
    the batch.
    """

    grads: Tree
    sums: Sums
    weights: Sums
    counts: Any
    mutable: Tree
    tokens: jax.Array | None = None


class OfOneBatch:
    """Gradients that no strategy combines: the hooks of the train step change nothing."""

    def read(self, state: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns what a strategy keeps in a state, and the parameters at which gradients are computed."""
        return state.get(SYNC), state["params"]

    def combine(self, sync: Any, grads: Tree, output: GradOutput, opt_state: Any) -> tuple[Any, Tree, Sums]:
        """Returns what a strategy keeps, the gradients of the batch, and metrics."""
        return sync, grads, {}

    def scale_updates(self, sync: Any, updates: Any) -> Any:
        """Returns the optimizer's updates as a strategy scales them."""
        return updates


@dataclass(frozen=True, eq=False)
class Gradients(OfOneBatch):
    """Computes (params, batch, key) -> gradients, loss terms, counts and mutable variables.

    Every array of the batch has a leading dim of global_batch rows. Gradients have the dtype and the sharding of the
    train state. They are of the sum over terms of sum / weight, times `loss_scale`.

    If replicas hold unsharded gradients (ZeRO 0 and 1) and there are several microbatches, every replica accumulates
    its own gradients, and they are reduced once, after the last microbatch. That changes what a row can know of others,
    so it is only for models that have no other variables and whose rows are declared or proven independent (see
    `losses.row_independence`). Otherwise the gradients of each microbatch are reduced at once. Mutable variables go
    from each microbatch to the next.

    Attributes:
        model_def: the model on the whole mesh.
        microbatches: microbatches of a step.
        replica_model_def: the model on one slice of the data axis; None if gradients are reduced at once.
        pipeline, replica_pipeline: executors of the pipeline schedule, which is then the loop over microbatches.
        batch_axes: manual mesh axes over which the global batch is split around these gradients, which are then a part
            of a sum: weights of terms and statistics are summed over them first. Weights in the output are of the part.
        is_present: False of a part that is left out of these sums; None: it is in them.
    """

    model_def: ModelDef
    sharder: Sharder
    microbatches: int = 1
    replica_model_def: ModelDef | None = None
    pipeline: Executor | None = None
    replica_pipeline: Executor | None = None
    batch_axes: tuple[str, ...] = ()
    is_present: jax.Array | None = None

    def __call__(
        self,
        params: Tree,
        batch: Batch,
        key: jax.Array,
        loss_scale: jax.Array | float = 1.0,
        other: NonTrainable = NOTHING,
    ) -> GradOutput:
        if not self.is_one_pass:
            return self._accumulated(params, batch, key, loss_scale, other)
        if self.batch_axes:
            one = jax.tree.map(lambda x: x[None], (dict(batch), key))
            batch = {**batch, **self._sum_parts(batch_statistics(self.model_def, params, other, *one))}

        def loss(proxies: Tree) -> tuple[jax.Array, tuple[Sums, Sums, Any, Tree]]:
            gathered = self._gather_replicas(attach_grad_proxies(proxies, params))
            terms, counts, mutable = self.model_def.loss(gathered, other, batch, key)
            sums, weights = _sums_and_weights(terms)
            return loss_scale * total(terms, scales(self._sum_parts(weights))), (sums, weights, counts, mutable)

        grads, aux = jax.grad(loss, has_aux=True)(self.grad_proxies(params))
        return GradOutput(self._to_storage(grads), *aux)

    @property
    def is_one_pass(self) -> bool:
        """True if there is one microbatch, so that no gradients are accumulated."""
        return self.microbatches == 1 and self.pipeline is None

    def grad_proxies(self, params: Tree) -> Tree:
        """Returns the arrays to differentiate with respect to.

        For stacked layers these are proxies in the communication dtype: the backward pass then stacks their gradients
        in that dtype. Parameters that are gathered over the data axis have gradients of that dtype anyway.
        """

        def proxy(p: jax.Array, names: Any, gather_dtype: Any) -> jax.Array:
            is_stored_unsharded = self.sharder.storage_dims(names, p.shape) == self.sharder.compute_dims(names, p.shape)
            return grad_proxy(p, gather_dtype) if is_stored_unsharded and names[:1] == (LAYERS,) else p

        return jax.tree.map(proxy, params, self.model_def.names, self.model_def.gather_dtypes)

    def _accumulated(
        self, params: Tree, batch: Batch, key: jax.Array, loss_scale: Any, other: NonTrainable
    ) -> GradOutput:
        """Accumulates over microbatches.

        Terms are normalised by their weight over the *global* batch, so a first pass sums the weights. These do not
        depend on activations: the compiler removes everything else from that pass.
        """
        batches = jax.tree.map(lambda x: split_microbatches(self.sharder, x, self.microbatches), dict(batch))
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(self.microbatches))
        gathered = self._gather_replicas(params)

        first = jax.tree.map(lambda x: x[0], batches)
        replica_def = self.replica_model_def
        if replica_def is None or uses_rng(self.model_def, gathered, first, key):
            replica_def, weights = None, term_weights(self.model_def, gathered, other, batches, keys)
        else:
            weights = self._replica_weights(replica_def, gathered, batches, keys)
        statistics = self._sum_parts(batch_statistics(self.model_def, gathered, other, batches, keys, self.pipeline))
        scale = {name: loss_scale * value for name, value in scales(self._sum_parts(weights)).items()}
        if replica_def is not None:
            loss = _MicrobatchLoss(replica_def, self.replica_pipeline, gathered, other, scale, statistics)
            grads, (sums, counts) = self._reduced_once(loss, batches, keys)
            return GradOutput(grads, sums, weights, counts, {})
        loss = _MicrobatchLoss(self.model_def, self.pipeline, gathered, other, scale, statistics)
        grads, (sums, counts), mutable = loss.accumulate(batches, keys, self._to_storage)
        return GradOutput(grads, sums, weights, counts, mutable)

    def _sum_parts(self, tree: Any) -> Any:
        """Sums over the parts of the batch that are present."""
        if (is_present := self.is_present) is not None:
            tree = jax.tree.map(lambda x: jnp.where(is_present, x, jnp.zeros_like(x)), tree)
        return jax.lax.psum(tree, self.batch_axes) if self.batch_axes else tree

    def _replica_weights(self, replica_def: ModelDef, params: Tree, batches: Batch, keys: jax.Array) -> Sums:
        """Sums the weights of the replicas' own rows, as their sums are: a mean is then one mean of each replica."""

        def weights(params: Tree, batches: Batch, keys: jax.Array) -> Sums:
            return jax.tree.map(lambda x: x[None], term_weights(replica_def, params, NOTHING, batches, keys))

        run = self.sharder.shard_map(weights, (P(), P(None, DATA_AXIS), P()), P(DATA_AXIS), axes=(DATA_AXIS,))
        return sum_leading_dim(run(params, batches, keys))

    def _reduced_once(self, loss: _MicrobatchLoss, batches: Batch, keys: jax.Array) -> tuple[Tree, Any]:
        """Accumulates the gradients of each replica, [replicas, ...], and reduces them after the last microbatch.

        This is a shard_map over the data axis. A vmap would use the batching rules of kernels, which cuDNN's attention
        does not have for packed documents, and would run both branches of every conditional.
        """
        replica = self.sharder.without_axis(DATA_AXIS)

        def to_storage(grads: Tree) -> Tree:
            constrain = lambda g, names: replica.constrain_dims(g, replica.storage_dims(names, g.shape))  # noqa: E731
            return jax.tree.map(constrain, grads, self.model_def.names)

        def accumulate(values: tuple, batches: Batch, keys: jax.Array) -> tuple[Tree, Any]:
            own = _MicrobatchLoss(loss.model_def, loss.pipeline, *values)
            return jax.tree.map(lambda x: x[None], own.accumulate(batches, keys, to_storage)[:2])

        def reduce(g: jax.Array, dtype: Any) -> Any:
            # lax.reduce, because jnp.sum would communicate in float32.
            return jax.lax.reduce(g.astype(dtype), jnp.zeros((), dtype), jax.lax.add, (0,))

        run = self.sharder.shard_map(accumulate, (P(), P(None, DATA_AXIS), P()), P(DATA_AXIS), axes=(DATA_AXIS,))
        grads, aux = run((loss.params, loss.other, loss.scale, loss.statistics), batches, keys)
        return self._to_storage(jax.tree.map(reduce, grads, self.model_def.gather_dtypes)), sum_leading_dim(aux)

    def _gather_replicas(self, params: Tree) -> Tree:
        """Returns parameters as the model uses them: gathered over the data axis if ZeRO shards them over it."""

        def gather(p: Any, names: Any, dtype: Any) -> Any:
            return p if isinstance(p, SplitGrad) else self.sharder.gather_replicas(p, names, dtype)

        is_leaf = lambda p: isinstance(p, SplitGrad)  # noqa: E731
        return jax.tree.map(gather, params, self.model_def.names, self.model_def.gather_dtypes, is_leaf=is_leaf)

    def _to_storage(self, grads: Tree) -> Tree:
        """Returns gradients with the sharding and the dtype of the train state; the cast follows the communication."""

        def store(g: jax.Array, names: Any, p: Any) -> jax.Array:
            g = self.sharder.constrain_dims(g, self.sharder.storage_dims(names, g.shape))
            return g.astype(jnp.promote_types(g.dtype, p.dtype))

        return jax.tree.map(store, grads, self.model_def.names, self.model_def.params)


@dataclass(frozen=True, eq=False)
class _MicrobatchLoss:
    """The loss of a microbatch, with all that is the same for every microbatch of a step."""

    model_def: ModelDef
    pipeline: Executor | None
    params: Tree
    other: NonTrainable
    scale: Sums
    statistics: Batch

    def add_gradients(self, mutable: Tree, batch: Batch, key: jax.Array, grads: Tree) -> tuple[Tree, tuple[Sums, Any]]:
        """Adds the gradients of a microbatch to a tree of float32 Refs, layer by layer as the backward pass runs.

        Returns the mutable variables after it, and (sums of the terms, counts).
        """

        def loss(proxies: Tree) -> tuple[jax.Array, tuple[Tree, tuple[Sums, Any]]]:
            params, other = attach_grad_proxies(proxies, self.params), self.other._replace(mutable=mutable)
            terms, counts, new = self.model_def.loss(params, other, {**batch, **self.statistics}, key)
            return total(terms, self.scale), (new, (_sums_and_weights(terms)[0], counts))

        value, pullback, aux = jax.vjp(loss, float32_grad_proxies(self.params), has_aux=True)
        pullback.with_refs(grads)(jnp.ones_like(value))
        return aux

    def accumulate(self, batches: Batch, keys: jax.Array, place: Callable[[Tree], Tree]) -> tuple[Tree, Any, Tree]:
        """Returns the float32 gradients of all microbatches, sharded by `place`, (sums, counts), and mutable variables.

        Mutable variables are those after the last microbatch.
        """
        if self.pipeline:
            inputs = StepInputs(batches, keys, self.scale, self.statistics)
            grads, aux = PipelineStep(self.pipeline, self.params, inputs).gradients(place)
            return grads, aux, {}
        zeros = place(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.params))
        grads = jax.tree.map(jax.new_ref, zeros)

        def run(mutable: Tree, inputs: tuple[Batch, jax.Array]) -> tuple[Tree, tuple[Sums, Any]]:
            return self.add_gradients(mutable, *inputs, grads)

        mutable, aux = jax.lax.scan(run, self.other.mutable, (batches, keys))
        return place(jax.tree.map(jax.freeze, grads)), sum_leading_dim(aux), mutable


class Reading(NamedTuple):
    """Parameters at which replicas compute gradients, with or without a leading replica dim.

    `is_present`, bool [replicas], is False of those that are left out; None: all are present.
    """

    params: Tree
    is_present: jax.Array | None


@dataclass(frozen=True, eq=False)
class ReplicaGradients:
    """Gradients of each replica, [replicas, ...], and of the batch as a strategy combines them.

    Takes the place of `Gradients` in a train step of state that has no replica dim. The mean over replicas is exactly
    the gradient of the batch, of which loss terms are sum / weight with the weights of all rows: each replica's are
    those of its rows, times the number of replicas.

    Attributes:
        one: gradients of one replica, for code that is manual over the mesh axis of the replicas.
        model_def: the model on the whole mesh.
        sharder: of the whole mesh.
        strategy: combines the gradients, and may say at which parameters each replica computes them.
        momenta: of what it combines in place of gradients: first moments of Adam; None: gradients.
    """

    one: Gradients
    model_def: ModelDef
    sharder: Sharder
    strategy: Strategy
    momenta: Momenta | None = None

    def read(self, state: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns what the strategy keeps, and the `Reading` at which gradients are computed."""
        own, params = self.strategy.read(state[SYNC]["own"], state["params"])
        return {**state[SYNC], "own": own}, Reading(params, self.strategy.present(own))

    def combine(self, sync: Any, grads: Tree, output: GradOutput, opt_state: Any) -> tuple[Any, Tree, Sums]:
        """Returns what the strategy keeps, the gradients of the batch, or the momentum, and metrics."""
        assert output.tokens is not None
        grads, norms = (grads, {}) if self.momenta is None else self.momenta(grads, opt_state)
        own, combined, metrics = self.strategy.combine(sync["own"], grads, output.tokens)
        return {**sync, "own": own}, combined, metrics | norms

    def scale_updates(self, sync: Any, updates: Any) -> Any:
        """Returns the optimizer's updates as the strategy scales them."""
        return self.strategy.scale_updates(sync["own"], updates)

    def __call__(
        self,
        reading: Reading,
        batch: Batch,
        key: jax.Array,
        loss_scale: jax.Array | float = 1.0,
        other: NonTrainable = NOTHING,
    ) -> GradOutput:
        """Returns gradients with a leading replica dim; sums, weights and counts are of the whole batch.

        Rows are split in the order of the replicas. Replica 0 has the random key, the others keys that follow from it.
        Mutable variables are averaged over replicas, weighted by tokens; integers are those of the first. Replicas that
        are not present have gradients of 0, and are in none of the sums and averages.

        Args:
            reading: parameters, and the replicas that are present.
            batch: rows of all replicas.
            key: random key.
            loss_scale: factor of the loss.
            other: variables that are not trained, without a replica dim.
        """
        params, is_present = reading
        axis, count = self.strategy.axis, self.strategy.replicas
        keys = jax.vmap(key_of_replica, (None, 0))(jax.random.key_data(key), jnp.arange(count))
        stacked, like = jax.tree.leaves(params)[0], jax.tree.leaves(self.model_def.params)[0]
        has_replica_dim = stacked.ndim > like.ndim
        if axis == DATA_AXIS:  # ZeRO shards weights over the replicas themselves
            gather = self.sharder.gather_replicas
            params = jax.tree.map(gather, params, self.model_def.names, self.model_def.gather_dtypes)
        is_present = jnp.ones((count,), bool) if is_present is None else is_present

        def run(
            params: Tree, batch: Batch, keys: jax.Array, is_present: jax.Array, shared: tuple[Any, NonTrainable]
        ) -> Any:
            scale, other = shared
            params = jax.tree.map(lambda p: p[0], params) if has_replica_dim else params
            part = replace(self.one, batch_axes=(axis,), is_present=is_present[0])
            output = part(params, batch, jax.random.wrap_key_data(keys[0]), scale * count, other)
            return jax.tree.map(lambda x: x[None], tuple(output)[:5])

        each = P(axis)
        specs = (each if has_replica_dim else P(), each, each, each, P())
        mapped = self.sharder.shard_map(run, specs, each, axes=(axis,))
        *sums, mutable = mapped(params, dict(batch), keys, is_present, (jnp.float32(loss_scale), other))
        grads, sums, weights, counts = choose(is_present, sums, jax.tree.map(jnp.zeros_like, sums))
        tokens = jnp.max(jnp.stack(list(weights.values())), 0)
        mutable = average(mutable, shares(tokens, is_present))
        sums, weights, counts = sum_leading_dim((sums, weights, counts))
        return GradOutput(grads, sums, weights, counts, mutable, tokens)


def term_weights(model_def: ModelDef, params: Tree, other: NonTrainable, batches: Batch, keys: jax.Array) -> Sums:
    """Returns the weights of all terms over all microbatches; the compiler removes the rest of the computation."""

    def weights(_: None, inputs: tuple[Batch, jax.Array]) -> tuple[None, Sums]:
        return None, _sums_and_weights(model_def.loss(params, other, *inputs)[0])[1]

    return sum_leading_dim(jax.lax.scan(weights, None, (batches, keys))[1])


def batch_statistics(
    model_def: ModelDef,
    params: Tree,
    other: NonTrainable,
    batches: Batch,
    keys: jax.Array,
    pipeline: Executor | None = None,
) -> Batch:
    """Sums the statistics that terms need of the whole batch over its microbatches.

    A model may have a method `statistics(batch, key)`, which returns a pytree of sums over rows or None, in a forward
    pass of its own. `loss` gets the sums over all microbatches as `batch["statistics"]`. An unsplit batch has no such
    key, and the model's own sums are the same. Pipeline stages compute them with `statistics_from_counts(counts)`.

    Returns:
        {"statistics": sums}, or {} if the model has none.
    """

    def statistics(_: None, inputs: tuple[Batch, jax.Array]) -> tuple[None, Any]:
        return None, getattr(model_def.bind(params, other, inputs[1]), "statistics", lambda *_: None)(*inputs)

    first = jax.tree.map(lambda x: x[0], (batches, keys))
    if pipeline and jax.eval_shape(lambda: statistics(None, first))[1] is not None:
        step = PipelineStep(pipeline.forward_only, params, StepInputs(batches, keys, {}, {}))
        return {"statistics": model_def.bind(params).statistics_from_counts(step.sums(head=False)[1])}
    sums = sum_leading_dim(jax.lax.scan(statistics, None, (batches, keys))[1])
    return {} if sums is None else {"statistics": sums}


def sum_leading_dim(tree: Any) -> Any:
    """Sums every leaf over its first dim."""
    return jax.tree.map(lambda x: x.sum(0), tree)


def _sums_and_weights(terms: Terms) -> tuple[Sums, Sums]:
    return {k: v[0] for k, v in terms.items()}, {k: jax.lax.stop_gradient(v[1]) for k, v in terms.items()}


def split_microbatches(sharder: Sharder, x: jax.Array, count: int) -> jax.Array:
    """[B, ...] -> [count, B / count, ...]; microbatch i has rows i, i + count, ..., so that no row changes device."""
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
    return sharder.constrain_leading(x, ((), sharder.axes(BATCH)))


def uses_rng(model_def: ModelDef, params: Tree, batch: Mapping[str, Any], key: jax.Array) -> bool:
    """Returns whether the loss reads its random key: its draws then depend on the rows of a forward pass.

    The model has no variables but its parameters.
    """
    jaxpr = jax.make_jaxpr(lambda key: model_def.loss(params, NOTHING, batch, key))(key).jaxpr
    return any(jaxpr.invars[0] in eqn.invars for eqn in jaxpr.eqns)
