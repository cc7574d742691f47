"""The train step and the evaluation step: pure functions, jitted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.schema import SpikeConfig
from jaxtrain.core import spike_detection
from jaxtrain.core.gradients import (
    Batch,
    Gradients,
    GradOutput,
    ReplicaGradients,
    batch_statistics,
    split_microbatches,
    sum_leading_dim,
    term_weights,
)
from jaxtrain.core.state import non_trainable
from jaxtrain.errors import UserError
from jaxtrain.losses.terms import Terms, are_pairs, as_pairs, means
from jaxtrain.models.model_def import NOTHING, ModelDef, NonTrainable, Tree
from jaxtrain.models.protocols import HasMetrics
from jaxtrain.optim.optimizers import clip_by_global_norm, ema_update
from jaxtrain.pipeline.executor import Executor, PipelineStep
from jaxtrain.pipeline.stage import StepInputs
from jaxtrain.precision.loss_scaling import update_loss_scale
from jaxtrain.sharding.sharder import Sharder
from jaxtrain.sync.local_step import SYNC

State = dict[str, Any]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[State, Batch], tuple[State, Metrics]]
TrainStepWithGradients = Callable[[State, Batch], tuple[State, Metrics, Tree]]


def train_step(
    gradients: Gradients | ReplicaGradients,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Callable[[jax.Array], jax.Array] | None,
    *,
    max_norm: float | None = None,
    ema_decay: float | None = None,
    spike: SpikeConfig | None = None,
    nan_steps: tuple[int, ...] = (),
) -> TrainStepWithGradients:
    """Returns one optimizer update on one global batch: (state, batch) -> (state, metrics, unclipped gradients).

    Every array of the batch has a leading dim of global_batch rows. Metrics are float32 scalars: `loss`, the mean of
    every term, `tokens` (the largest weight of a term), `grad_norm` (before clipping), `lr`, and the metrics that the
    model computes from its counts. A step whose loss or gradient norm is not finite is skipped: the metric `skipped` is
    1, and only `step` changes. All devices decide the same, because both numbers are of the global batch.

    With `scaling` in the state, the loss is scaled; a skipped step then has grad_norm 0 and lowers the scale. With
    `spikes` in the state, `spike` is the robust z-score of loss and norm, and the action `skip` skips spikes, too.

    Args:
        gradients: computes gradients of a global batch, by each replica apart for a strategy that combines them: what
            that keeps in the state changes with the parameters.
        optimizer: update rule.
        schedule: learning rate by step, for the metric `lr`; None: an optimizer that has its own.
        max_norm: gradients of a larger global norm are scaled down to it.
        ema_decay: decay of the average of the parameters.
        spike: response to spikes.
        nan_steps: steps (from 1) whose gradients are replaced by NaN, to test recovery.
    """

    def step(state: State, batch: Batch) -> tuple[State, Metrics, Tree]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), state["step"])
        loss_scale = state["scaling"]["scale"] if "scaling" in state else jnp.float32(1)
        sync, read = gradients.read(state)
        had = {**state, SYNC: sync}  # what is read is read, also if the step is skipped
        output = gradients(read, batch, key, loss_scale, non_trainable(state))
        grads = output.grads
        if "scaling" in state:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / loss_scale, grads)
        if nan_steps:
            is_bad = jnp.isin(state["step"] + 1, jnp.array(nan_steps, jnp.int32))
            grads = jax.tree.map(lambda g: jnp.where(is_bad, jnp.nan, g).astype(g.dtype), grads)
        sync, grads, sync_metrics = gradients.combine(sync, grads, output, state["opt_state"])
        clipped, norm = clip_by_global_norm(grads, max_norm, gradients.model_def.names)
        metrics = _step_metrics(gradients.model_def, output) | {"grad_norm": norm} | sync_metrics
        if schedule is not None:
            metrics["lr"] = jnp.asarray(schedule(state["step"]), jnp.float32)
        extra = {"value": metrics["loss"], "grad": clipped}
        updates, opt_state = optimizer.update(clipped, state["opt_state"], state["params"], **extra)
        params = optax.apply_updates(state["params"], gradients.scale_updates(sync, updates))
        is_accepted, guard_state, guard_metrics = _accept_update(state, metrics, spike)
        changed = {"params": params, "opt_state": opt_state, "mutable": output.mutable, SYNC: sync}
        new = _select(is_accepted, {name: tree for name, tree in changed.items() if tree}, had)
        if ema_decay is not None:
            new |= _select(is_accepted, {"ema": ema_update(state["ema"], new["params"], ema_decay)}, state)
        return {**state, **new, **guard_state, "step": state["step"] + 1}, {**metrics, **guard_metrics}, grads

    return step


# Names of the metrics of every step, beside `loss`, the sum of the terms.
STEP_METRICS = {
    "tokens", "grad_norm", "lr", "skipped", "spike", "loss_scale", "step",
    "skipped_replicas", "consensus_distance", "exchanged_bytes", "left_out",  # of replicas that agree loosely
    "staleness", "staleness_max", "pushing", "received_bytes",  # of workers that push to a server
}  # fmt: skip


def drop_gradients(step_with_gradients: TrainStepWithGradients) -> TrainStep:
    """Returns a train step without its third result."""

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:  # its name is that of the compiled module, jit_step
        return step_with_gradients(state, batch)[:2]

    return step


def _step_metrics(model_def: ModelDef, output: GradOutput) -> Metrics:
    """Returns the mean of every term, `loss`, `tokens` and the model's own metrics.

    Raises:
        UserError: two of them have one name.
    """
    terms = means({name: (output.sums[name], weight) for name, weight in output.weights.items()})
    own = count_metrics(model_def, output.counts)
    taken = sorted((terms.keys() & (own.keys() | STEP_METRICS)) | (own.keys() & {*STEP_METRICS, "loss"}))
    if taken or ("loss" in terms and len(terms) > 1):
        name = taken[0] if taken else "loss"
        raise UserError(f"model.type: the loss returns the name `{name}`, which another metric has; expected another")
    metrics = terms | own
    metrics["loss"] = jnp.sum(jnp.stack(list(terms.values())))
    metrics["tokens"] = jnp.max(jnp.stack(list(output.weights.values())))
    return metrics


def count_metrics(model_def: ModelDef, counts: Any) -> Metrics:
    """Returns the model's own metrics of a step, from its counts.

    Raises:
        UserError: counts are no {name: (sum, weight)}, and the model has no method `metrics`.
    """
    if counts is None:
        return {}
    model = model_def.abstract()
    if isinstance(model, HasMetrics):
        return {name: jnp.asarray(value, jnp.float32) for name, value in model.metrics(counts).items()}
    if not are_pairs(counts):
        expected = "expected {name: scalar or (sum, weight)}, or a method `metrics(counts)`, too"
        raise UserError(f"model.type: the loss returned (terms, counts); {expected}")
    return means(counts)


def _accept_update(state: State, metrics: Metrics, spike: SpikeConfig | None) -> tuple[jax.Array, State, Metrics]:
    """Returns whether the update is applied, the state that changes in any case, and metrics."""
    loss, norm = metrics["loss"], metrics["grad_norm"]
    # With the loss first, XLA reduces it over devices together with the gradients. Otherwise it does so with the
    # weights in the middle of the step, where all devices would wait for one another.
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    is_accepted, new, added = is_finite, {}, {}
    if spike is not None and spike.action != "none":
        added["spike"] = spike_detection.score(state["spikes"], loss, norm)
        new["spikes"] = spike_detection.push(state["spikes"], loss, norm)
        if spike.action == "skip":
            is_accepted = is_finite & (added["spike"] <= spike.threshold)
    if "scaling" in state:
        new["scaling"] = update_loss_scale(state["scaling"], is_finite)
        added |= {"grad_norm": jnp.where(is_finite, norm, 0.0), "loss_scale": new["scaling"]["scale"]}
    return is_accepted, new, added | {"skipped": 1.0 - is_accepted.astype(jnp.float32)}


def _select(is_accepted: jax.Array, new: State, old: State) -> State:
    """Returns `new` if accepted, else the same entries of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(is_accepted, a, b), new, {name: old[name] for name in new})


def eval_step(
    model_def: ModelDef, sharder: Sharder, microbatches: int = 1, pipeline: Executor | None = None
) -> Callable[..., tuple[Terms, Any]]:
    """Returns (params, batch, other variables) -> (loss terms, counts), in as many microbatches as in training.

    Terms are (sum, weight). Terms and counts of several batches can be summed; stages give no counts. Mutable variables
    are read and not changed.
    """

    def evaluate(params: Tree, batch: Batch, other: NonTrainable = NOTHING) -> tuple[Terms, Any]:
        batches = jax.tree.map(lambda x: split_microbatches(sharder, x, microbatches), dict(batch))
        keys = jnp.broadcast_to(jax.random.key(0), (microbatches,))
        statistics = batch_statistics(model_def, params, other, batches, keys, pipeline) if microbatches > 1 else {}
        if pipeline:
            weights = term_weights(model_def, params, other, batches, keys)
            ones = dict.fromkeys(weights, jnp.ones(()))
            inputs = StepInputs(batches, keys, ones, statistics)
            sums, _ = PipelineStep(pipeline.forward_only, params, inputs).sums()
            return {name: (sums[name], weight) for name, weight in weights.items()}, None

        def microbatch_terms(_: None, inputs: tuple[Batch, jax.Array]) -> tuple[None, tuple[Terms, Any]]:
            rows, key = inputs
            return None, model_def.loss(params, other, {**rows, **statistics}, key, is_training=False)[:2]

        return sum_leading_dim(jax.lax.scan(microbatch_terms, None, (batches, keys))[1])

    return evaluate


def metrics_step(
    model_def: ModelDef, sharder: Sharder, microbatches: int, functions: Mapping[str, Callable[..., Any]]
) -> Callable[..., Terms]:
    """Returns (params, batch, other variables) -> {name: (sum, weight)} of users' metrics.

    Args:
        model_def: the model, which a metric gets as after `eval()`.
        sharder: mesh and rules.
        microbatches: parts in which a batch is computed.
        functions: name -> function of (model, batch) that returns a mean of the rows, or (sum, weight).
    """

    def compute(params: Tree, batch: Batch, other: NonTrainable = NOTHING) -> Terms:
        def add(_: None, rows: Batch) -> tuple[None, Terms]:
            model = model_def.bind(params, other, None, is_training=False)
            values = {name: function(model, rows) for name, function in functions.items()}
            count = len(next(iter(rows.values())))
            pairs = as_pairs(values, count)
            if values and not are_pairs(pairs):
                wrong = next(name for name, value in values.items() if not are_pairs(as_pairs({name: value}, count)))
                raise UserError(f"eval.metrics.{wrong}: expected a scalar or (sum, weight) from the function")
            return None, pairs

        batches = jax.tree.map(lambda x: split_microbatches(sharder, x, microbatches), dict(batch))
        return sum_leading_dim(jax.lax.scan(add, None, batches)[1])

    return compute
