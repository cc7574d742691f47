"""GPipe by autodiff, for pipeline.py: a scan over ticks with one permutation in each, and `jax.grad` of all of it.

This is the usual form without a hand-written backward pass (Huang et al., arXiv 1811.06965, as a scan): stages compute
in all M + p - 1 ticks, also in those before their first microbatch and after their last one, and the scan saves the
residuals of every tick. Model, optimizer and train step are jaxtrain's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxtrain.config.schema import Config
from jaxtrain.core.gradients import Batch, GradOutput, OfOneBatch, split_microbatches
from jaxtrain.core.program import Program, build_program
from jaxtrain.core.step import drop_gradients, train_step
from jaxtrain.losses.terms import scales, total
from jaxtrain.models.model_def import NOTHING, ModelDef, NonTrainable
from jaxtrain.optim.optimizers import make_optimizer
from jaxtrain.optim.schedules import make_schedule
from jaxtrain.pipeline.partition import LayerPartition
from jaxtrain.sharding.rules import PIPELINE_AXIS


@dataclass(frozen=True, eq=False)
class GPipe(OfOneBatch):
    """Computes gradients like `jaxtrain.core.gradients.Gradients`, of models whose layers have no loss terms.

    Attributes:
        model_def: the model on the whole mesh.
        stage_def: the model on one slice of the pipeline axis.
        partition: layers of the stages, one chunk per stage.
        remat: save only the input of a stage and recompute the stage, in addition to `step.remat` of its layers.
    """

    model_def: ModelDef
    stage_def: ModelDef
    partition: LayerPartition
    remat: bool

    def __call__(
        self, params: Any, batch: Batch, key: Array, loss_scale: Any = 1.0, other: NonTrainable = NOTHING
    ) -> GradOutput:
        del other  # stages hold trained parameters only
        count = self.partition.table.microbatches
        batches = jax.tree.map(lambda x: split_microbatches(self.partition.sharder, x, count), dict(batch))
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(count))

        def loss(params: Any) -> tuple[Array, tuple[dict, dict]]:
            model = self.model_def.bind(params)
            embedded = lax.map(lambda one: model.embed_inputs(*one), (batches, keys))
            outputs = self._run_layers(self.partition.split_layers(params)[0], embedded, batches, keys)
            head = jax.checkpoint(lambda one: self.model_def.bind(params).head_loss(one[0], *one[1:]))
            terms = {name: (s.sum(), w.sum()) for name, (s, w) in lax.map(head, (outputs, batches, keys)).items()}
            sums, weights = ({name: term[part] for name, term in terms.items()} for part in (0, 1))
            return loss_scale * total(terms, scales(lax.stop_gradient(weights))), (sums, weights)

        grads, (sums, weights) = jax.grad(loss, has_aux=True)(params)
        return GradOutput(jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums, weights, None, {})

    def _run_layers(self, weights: Any, embedded: Any, batches: Batch, keys: Array) -> Any:
        """Returns the output of the last layer, [microbatches, ...]."""
        table, partition = self.partition.table, self.partition

        def run_stage(weights: Any, layers: Any, embedded: Any, batches: Batch, keys: Array) -> Any:
            stage_layers = jax.tree.map(lambda n: n[0, 0], layers)
            stage = lax.axis_index(PIPELINE_AXIS)

            def take(tree: Any, index: Any) -> Any:
                index = jnp.clip(index, 0, table.microbatches - 1)
                return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)

            def forward(weights: Any, x: Any, batch: Batch, key: Array) -> Any:
                return self.stage_def.bind(partition.merge_layers(weights, {})).run_layers(x, batch, key, stage_layers)[
                    0
                ]

            def tick(x: Any, number: Array) -> tuple[Any, Any]:
                x = jax.tree.map(lambda new, old: jnp.where(stage == 0, new, old), take(embedded, number), x)
                y = (jax.checkpoint(forward) if self.remat else forward)(
                    weights, x, *take((batches, keys), number - stage)
                )
                pairs = [(i, (i + 1) % table.stages) for i in range(table.stages)]
                return jax.tree.map(lambda y: lax.ppermute(y, PIPELINE_AXIS, pairs), y), y

            zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), embedded)
            _, outputs = lax.scan(tick, zeros, jnp.arange(table.microbatches + table.stages - 1))
            return jax.tree.map(lambda y: y[None, table.stages - 1 :], outputs)

        specs = (P(PIPELINE_AXIS), P(PIPELINE_AXIS), P(), P(), P())
        run = partition.sharder.shard_map(run_stage, specs, P(PIPELINE_AXIS), axes=(PIPELINE_AXIS,))
        return jax.tree.map(lambda y: y[-1], run(weights, partition.layers, embedded, batches, keys))


def program(config: Config, vocab: int | None, devices: Sequence[Any], remat: bool) -> Program:
    """Returns the program of a config of `pipeline.schedule: gpipe`, with gradients by autodiff."""
    base = build_program(config, vocab, devices)
    model_def, executor, options = base.model_def, base.gradients.pipeline, config.optimizer
    if executor is None or executor.table.chunks != 1:
        raise ValueError("mesh.pipeline: expected several stages of one chunk")
    gradients: Any = GPipe(model_def, executor.stage_def, executor.partition, remat)
    rate = make_schedule(options.lr, config.schedule, config.steps)
    tx = make_optimizer(options, rate, model_def.names, model_def.params)
    step = train_step(gradients, tx, rate, max_norm=options.grad_clip_norm, ema_decay=options.ema_decay)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, base.state), base.sharder.sharding(())
    jitted = jax.jit(drop_gradients(step), donate_argnums=0, out_shardings=shardings)
    return replace(base, gradients=gradients, step=jitted)
