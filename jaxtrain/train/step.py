"""The train step and the evaluation step: pure functions, jitted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.mesh.rules import BATCH
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.models.define import Definition, Tree
from jaxtrain.optim.optimizers import clip, ema_update
from jaxtrain.train.loss import parted, scales, total

Batch = Mapping[str, jax.Array]
State = dict[str, Any]
Metrics = dict[str, jax.Array]


def train_step(
    definition: Definition,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array],
    sharder: Sharder,
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    ema: float | None = None,
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """One optimizer update on one global batch: (state, batch) -> (state, metrics).

    Every array of the batch has a leading dim of global_batch rows. Metrics are float32 scalars: `loss`, every
    term's mean, `tokens` (the largest term's weight), `grad_norm` (before clipping), `lr`, and those that the model
    makes of its counts (see `loss.parted`).
    """
    gradients = _accumulated if accumulate > 1 else _whole

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])
        grads, sums, weights, counts = gradients(definition, sharder, state["params"], batch, key, accumulate)
        grads, norm = clip(grads, max_norm, definition.names)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {**state, "step": state["step"] + 1, "params": params, "opt_state": opt_state}
        if ema is not None:
            new["ema"] = ema_update(state["ema"], params, ema)
        means = {name: sums[name] * scale for name, scale in scales(weights).items()}
        own = {} if counts is None else definition.bind(state["params"]).metrics(counts)
        return new, {
            **means,
            **{name: jnp.asarray(value, jnp.float32) for name, value in own.items()},
            "loss": jnp.sum(jnp.stack(list(means.values()))),
            "tokens": jnp.max(jnp.stack(list(weights.values()))),
            "grad_norm": norm,
            "lr": jnp.asarray(schedule(state["step"]), jnp.float32),
        }

    return step


def eval_step(
    definition: Definition, sharder: Sharder, accumulate: int = 1
) -> Callable[[Tree, Batch], dict[str, tuple[jax.Array, jax.Array]]]:
    """(params, batch) -> loss terms as (sum, weight), to be added up over batches; in as many parts as training."""

    def evaluate(params: Tree, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        def part(_: None, inputs: Batch) -> tuple[None, dict]:
            return None, parted(definition.bind(params).loss(inputs, jax.random.key(0)))[0]

        micro = jax.tree.map(lambda x: _microbatches(sharder, x, accumulate), dict(batch))
        return _summed(jax.lax.scan(part, None, micro)[1])

    return evaluate


def _split(terms: Mapping) -> tuple[dict, dict]:
    return {k: v[0] for k, v in terms.items()}, {k: jax.lax.stop_gradient(v[1]) for k, v in terms.items()}


def _whole(definition: Definition, sharder: Sharder, params: Tree, batch: Batch, key: jax.Array, _: int):
    """Gradients, sums, weights and counts of the whole batch at once."""

    def loss(params: Tree) -> tuple[jax.Array, tuple[dict, dict, Any]]:
        terms, counts = parted(definition.bind(params).loss(batch, key))
        sums, weights = _split(terms)
        return total(terms, scales(weights)), (sums, weights, counts)

    grads, rest = jax.grad(loss, has_aux=True)(params)
    return _stored(definition, sharder, grads), *rest


def _accumulated(definition: Definition, sharder: Sharder, params: Tree, batch: Batch, key: jax.Array, count: int):
    """The same, over `count` microbatches in a scan.

    Terms are normalised by their weight over the *global* batch, so a first pass adds up the weights. They do not
    depend on activations: the compiler drops all of the forward pass from it but the counting.

    A model may have a method `statistics(batch, key)` for what else a term must know of the global batch: a pytree of
    sums over rows, or None. They are added up in the first pass (which then has a forward pass to do) and handed to
    `loss` as `batch["statistics"]`. In a batch that is not cut `loss` finds none, and its own sums are the same.
    """
    micro = jax.tree.map(lambda x: _microbatches(sharder, x, count), dict(batch))
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(count))

    def weigh(_: None, inputs: tuple) -> tuple[None, tuple[dict, Any]]:
        model = definition.bind(params)
        statistics = getattr(model, "statistics", lambda *_: None)(*inputs)
        return None, (_split(parted(model.loss(*inputs))[0])[1], statistics)

    weights, statistics = _summed(jax.lax.scan(weigh, None, (micro, keys))[1])
    scale = scales(weights)
    known = {} if statistics is None else {"statistics": statistics}

    def add(grads: Tree, inputs: tuple) -> tuple[Tree, tuple[dict, Any]]:
        def loss(params: Tree) -> tuple[jax.Array, tuple[dict, Any]]:
            terms, counts = parted(definition.bind(params).loss(inputs[0] | known, inputs[1]))
            return total(terms, scale), (_split(terms)[0], counts)

        more, rest = jax.grad(loss, has_aux=True)(params)
        grads = jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, more)
        return _stored(definition, sharder, grads), rest

    zeros = _stored(definition, sharder, jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    grads, rest = jax.lax.scan(add, zeros, (micro, keys))
    sums, counts = _summed(rest)
    return grads, sums, weights, counts


def _summed(tree: Any) -> Any:
    """Every leaf summed over its first dim, that of the microbatches."""
    return jax.tree.map(lambda x: x.sum(0), tree)


def _microbatches(sharder: Sharder, x: jax.Array, count: int) -> jax.Array:
    """[B, ...] -> [count, B / count, ...]; microbatch i has rows i, i + count, ..., so that no row changes device."""
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
    return sharder.constrain(x, None, BATCH, *(None,) * (x.ndim - 2))


def _stored(definition: Definition, sharder: Sharder, grads: Tree) -> Tree:
    """Gradients placed like the parameters they belong to."""
    return jax.tree.map(lambda g, names: sharder.constrain(g, *names), grads, definition.names)
