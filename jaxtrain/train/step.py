"""The train step and the evaluation step: pure functions, jitted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import UserError
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.models.define import Definition, Tree
from jaxtrain.optim.optimizers import clip, ema_update
from jaxtrain.pipeline.executor import Executor, Run
from jaxtrain.pipeline.stage import Shared
from jaxtrain.precision.scaling import updated
from jaxtrain.train.gradients import Batch, Gradients, microbatches, statistics, summed, weigh
from jaxtrain.train.loss import parted, scales

State = dict[str, Any]
Metrics = dict[str, jax.Array]


def train_step(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array],
    *,
    max_norm: float | None = None,
    ema: float | None = None,
) -> Callable[[State, Batch], tuple[State, Metrics, Tree]]:
    """One optimizer update on one global batch: (state, batch) -> (state, metrics, gradients before clipping).

    Every array of the batch has a leading dim of global_batch rows. Metrics are float32 scalars: `loss`, every
    term's mean, `tokens` (the largest term's weight), `grad_norm` (before clipping), `lr`, and those that the model
    makes of its counts (see `loss.parted`). A state that holds `scaling` has its loss scaled: a step whose gradients
    are not finite is skipped (`skipped` 1, `grad_norm` 0) and the scale lowered; only `step` moves on.
    """

    def step(state: State, batch: Batch) -> tuple[State, Metrics, Tree]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])
        scale = state["scaling"]["scale"] if "scaling" in state else jnp.float32(1)
        found = gradients(state["params"], batch, key, scale)
        grads, definition = found.grads, gradients.definition
        if "scaling" in state:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        clipped, norm = clip(grads, max_norm, definition.names)
        updates, opt_state = optimizer.update(clipped, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {**state, "step": state["step"] + 1, "params": params, "opt_state": opt_state}
        if ema is not None:
            new["ema"] = ema_update(state["ema"], params, ema)
        means = {name: found.sums[name] * factor for name, factor in scales(found.weights).items()}
        own = {} if found.counts is None else _of_counts(definition.bind(state["params"]), found.counts)
        metrics = {
            **means,
            **own,
            "loss": jnp.sum(jnp.stack(list(means.values()))),
            "tokens": jnp.max(jnp.stack(list(found.weights.values()))),
            "grad_norm": norm,
            "lr": jnp.asarray(schedule(state["step"]), jnp.float32),
        }
        if "scaling" in state:
            new, metrics = _unless_overflown(state, new, metrics)
        return new, metrics, grads

    return step


def without_gradients(whole: Callable[[State, Batch], tuple[State, Metrics, Tree]]) -> Callable:
    """The `train_step` that trains: (state, batch) -> (state, metrics)."""

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        return whole(state, batch)[:2]

    return step


def _of_counts(model: Any, counts: Any) -> Metrics:
    """The model's own metrics."""
    if not hasattr(model, "metrics"):
        raise UserError("model.type: `loss` returned counts beside its terms; expected a method `metrics(counts)` too")
    return {name: jnp.asarray(value, jnp.float32) for name, value in model.metrics(counts).items()}


def _unless_overflown(old: State, new: State, metrics: Metrics) -> tuple[State, Metrics]:
    """The new state, or the old one with only `step` moved on and the loss scale lowered."""
    is_finite = jnp.isfinite(metrics["grad_norm"])
    kept = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)
    scaling = updated(old["scaling"], is_finite)
    said = {"loss_scale": scaling["scale"], "skipped": 1.0 - is_finite.astype(jnp.float32)}
    norm = jnp.where(is_finite, metrics["grad_norm"], 0.0)
    return {**kept, "step": new["step"], "scaling": scaling}, {**metrics, "grad_norm": norm, **said}


def eval_step(
    definition: Definition, sharder: Sharder, accumulate: int = 1, pipeline: Executor | None = None
) -> Callable[[Tree, Batch], dict[str, tuple[jax.Array, jax.Array]]]:
    """(params, batch) -> loss terms as (sum, weight), to be added up over batches; in as many parts as training."""

    def evaluate(params: Tree, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        micro = jax.tree.map(lambda x: microbatches(sharder, x, accumulate), dict(batch))
        keys = jnp.broadcast_to(jax.random.key(0), (accumulate,))
        known = statistics(definition, params, micro, keys, pipeline) if accumulate > 1 else {}
        if pipeline:
            weights = weigh(definition, params, micro, keys)
            ones = dict.fromkeys(weights, jnp.ones(()))
            sums, _ = Run(pipeline.forward, params, Shared(micro, keys, ones, known)).sums()
            return {name: (sums[name], weight) for name, weight in weights.items()}

        def part(_: None, inputs: tuple[Batch, jax.Array]) -> tuple[None, dict]:
            rows, key = inputs
            return None, parted(definition.bind(params).loss({**rows, **known}, key))[0]

        return summed(jax.lax.scan(part, None, (micro, keys))[1])

    return evaluate
