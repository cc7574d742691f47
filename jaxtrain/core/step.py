"""The train step and the evaluation step: pure functions, jitted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.schema import SpikeConfig
from jaxtrain.core import spike_detection as windows
from jaxtrain.core.gradients import Batch, Gradients, microbatches, statistics, summed, weigh
from jaxtrain.errors import UserError
from jaxtrain.losses.terms import parted, scales
from jaxtrain.models.definition import Definition, Tree
from jaxtrain.optim.optimizers import clip, ema_update
from jaxtrain.pipeline.executor import Executor, Run
from jaxtrain.pipeline.stage import StepInputs
from jaxtrain.precision.loss_scaling import updated
from jaxtrain.sharding.sharder import Sharder

State = dict[str, Any]
Metrics = dict[str, jax.Array]


def train_step(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array],
    *,
    max_norm: float | None = None,
    ema: float | None = None,
    spike: SpikeConfig | None = None,
    poisoned: tuple[int, ...] = (),
) -> Callable[[State, Batch], tuple[State, Metrics, Tree]]:
    """One optimizer update on one global batch: (state, batch) -> (state, metrics, gradients before clipping).

    Every array of the batch has a leading dim of global_batch rows. Metrics are float32 scalars: `loss`, every
    term's mean, `tokens` (the largest term's weight), `grad_norm` (before clipping), `lr`, and those that the model
    makes of its counts (see `loss.parted`). A step whose loss or gradient norm is not finite is skipped: `skipped` is
    1, and only `step` moves on, in one branch on every device, because both numbers are of the whole batch.

    A state that holds `scaling` has its loss scaled; of a skipped step `grad_norm` is 0 and the scale is lowered. One
    that holds `spikes` gives `spike`, the robust z-score of loss and norm; a `spike` of action skip skips, too. The
    gradients of the `poisoned` steps (from 1) are NaN, for tests.
    """

    def step(state: State, batch: Batch) -> tuple[State, Metrics, Tree]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])
        scale = state["scaling"]["scale"] if "scaling" in state else jnp.float32(1)
        found = gradients(state["params"], batch, key, scale)
        grads, definition = found.grads, gradients.definition
        if "scaling" in state:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        if poisoned:
            is_bad = jnp.isin(state["step"] + 1, jnp.array(poisoned, jnp.int32))
            grads = jax.tree.map(lambda g: jnp.where(is_bad, jnp.nan, g).astype(g.dtype), grads)
        clipped, norm = clip(grads, max_norm, definition.names)
        updates, opt_state = optimizer.update(clipped, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
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
        is_good, apart, said = _judged(state, metrics, spike)
        new = _where(is_good, {"params": params, "opt_state": opt_state}, state)
        if ema is not None:  # of the parameters that are kept
            new |= _where(is_good, {"ema": ema_update(state["ema"], new["params"], ema)}, state)
        return {**state, **new, **apart, "step": state["step"] + 1}, {**metrics, **said}, grads

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


def _judged(old: State, metrics: Metrics, spike: SpikeConfig | None) -> tuple[jax.Array, State, Metrics]:
    """Decides if a step is kept; returns that, the state that changes in any case, and metrics."""
    loss, norm = metrics["loss"], metrics["grad_norm"]
    # The loss first: XLA then adds it up over devices with the gradients, not with the weights amid the step, where all
    # devices would wait for one another.
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    is_good, apart, said = is_finite, {}, {}
    if spike is not None and spike.action != "none":
        said["spike"] = windows.score(old["spikes"], loss, norm)
        apart["spikes"] = windows.pushed(old["spikes"], loss, norm)
        is_good = is_finite & (said["spike"] <= spike.threshold) if spike.action == "skip" else is_finite
    if "scaling" in old:
        apart["scaling"] = scaling = updated(old["scaling"], is_finite)
        said |= {"grad_norm": jnp.where(is_finite, norm, 0.0), "loss_scale": scaling["scale"]}
    return is_good, apart, said | {"skipped": 1.0 - is_good.astype(jnp.float32)}


def _where(is_good: jax.Array, new: State, old: State) -> State:
    """`new`, or what `old` has in its place."""
    return jax.tree.map(lambda a, b: jnp.where(is_good, a, b), new, {name: old[name] for name in new})


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
            sums, _ = Run(pipeline.forward, params, StepInputs(micro, keys, ones, known)).sums()
            return {name: (sums[name], weight) for name, weight in weights.items()}

        def part(_: None, inputs: tuple[Batch, jax.Array]) -> tuple[None, dict]:
            rows, key = inputs
            return None, parted(definition.bind(params).loss({**rows, **known}, key))[0]

        return summed(jax.lax.scan(part, None, (micro, keys))[1])

    return evaluate
