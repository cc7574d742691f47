"""GPipe by autodiff, for pipeline.py: a scan over ticks with one permutation in each, and `jax.grad` through all of it.

The form without a hand-written backward pass (Huang et al., arXiv 1811.06965, as a scan): stages compute in all
M + p - 1 ticks, in the bubble on unused values, and the scan keeps the residuals of every tick for the backward pass.
Model, optimizer and train step are jaxtrain's.
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
from jaxtrain.core.gradients import Batch, GradOutput, split_microbatches
from jaxtrain.core.program import Program, build_program
from jaxtrain.core.step import drop_gradients, train_step
from jaxtrain.losses.terms import scales, total
from jaxtrain.models.model_def import ModelDef
from jaxtrain.optim.optimizers import optimizer
from jaxtrain.optim.schedules import schedule
from jaxtrain.pipeline.partition import Stages
from jaxtrain.sharding.rules import PIPELINE_AXIS


@dataclass(frozen=True, eq=False)
class GPipe:
    """Gradients like those of `jaxtrain.core.gradients.Gradients`, for models whose layers return no loss terms.

    Args:
        stage_def: the model on one slice of `pipeline`.
        stages: of a table with one chunk a stage.
        remat: keep only a stage's input and recompute the stage, in addition to `step.remat` of its layers.
    """

    model_def: ModelDef
    stage_def: ModelDef
    stages: Stages
    remat: bool

    def __call__(self, params: Any, batch: Batch, key: Array, loss_scale: Any = 1.0) -> GradOutput:
        stages = self.stages
        count = stages.table.microbatches
        micro = jax.tree.map(lambda x: split_microbatches(stages.sharder, x, count), dict(batch))
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(count))

        def loss(params: Any) -> tuple[Array, tuple[dict, dict]]:
            model = self.model_def.bind(params)
            begun = lax.map(lambda one: model.embed_inputs(*one), (micro, keys))
            done = self._through(stages.split_layers(params)[0], begun, micro, keys)
            ends = jax.checkpoint(lambda one: self.model_def.bind(params).head_loss(one[0], *one[1:]))
            terms = {name: (s.sum(), w.sum()) for name, (s, w) in lax.map(ends, (done, micro, keys)).items()}
            sums, weights = ({name: term[part] for name, term in terms.items()} for part in (0, 1))
            return loss_scale * total(terms, scales(lax.stop_gradient(weights))), (sums, weights)

        grads, (sums, weights) = jax.grad(loss, has_aux=True)(params)
        return GradOutput(jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums, weights, None)

    def _through(self, layers: Any, begun: Any, micro: Batch, keys: Array) -> Any:
        """Output of the last layer, [microbatches, ...]."""
        table = self.stages.table

        def body(layers: Any, numbers: Any, begun: Any, micro: Batch, keys: Array) -> Any:
            own = jax.tree.map(lambda n: n[0, 0], numbers)
            stage = lax.axis_index(PIPELINE_AXIS)

            def take(tree: Any, index: Any) -> Any:
                index = jnp.clip(index, 0, table.microbatches - 1)
                return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)

            def work(layers: Any, x: Any, batch: Batch, key: Array) -> Any:
                return self.stage_def.bind(self.stages.merge_layers(layers, {})).run_layers(x, batch, key, own)[0]

            def tick(x: Any, number: Array) -> tuple[Any, Any]:
                x = jax.tree.map(lambda new, old: jnp.where(stage == 0, new, old), take(begun, number), x)
                y = (jax.checkpoint(work) if self.remat else work)(layers, x, *take((micro, keys), number - stage))
                ring = [(i, (i + 1) % table.stages) for i in range(table.stages)]
                return jax.tree.map(lambda y: lax.ppermute(y, PIPELINE_AXIS, ring), y), y

            zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), begun)
            _, made = lax.scan(tick, zeros, jnp.arange(table.microbatches + table.stages - 1))
            return jax.tree.map(lambda y: y[None, table.stages - 1 :], made)

        run = self.stages.sharder.shard_map(
            body, (P(PIPELINE_AXIS), P(PIPELINE_AXIS), P(), P(), P()), P(PIPELINE_AXIS), axes=(PIPELINE_AXIS,)
        )
        made = run(layers, self.stages.layers, begun, micro, keys)
        return jax.tree.map(lambda y: y[-1], made)


def program(config: Config, vocab: int | None, devices: Sequence[Any], remat: bool) -> Program:
    """Program of a config of `pipeline.schedule: gpipe`, with gradients by autodiff."""
    base = build_program(config, vocab, devices)
    model_def, executor, options = base.model_def, base.gradients.pipeline, config.optimizer
    if executor is None or executor.table.chunks != 1:
        raise ValueError("mesh.pipeline: expected several stages of one chunk")
    gradients: Any = GPipe(model_def, executor.stage_def, Stages(executor.table, model_def, base.sharder), remat)
    rate = schedule(options.lr, config.schedule, config.steps)
    tx = optimizer(options, rate, model_def.names, model_def.params)
    step = train_step(gradients, tx, rate, max_norm=options.grad_clip_norm, ema_decay=options.ema_decay)
    placed = jax.tree.map(lambda leaf: leaf.sharding, base.state)
    out = (placed, base.sharder.sharding(()))
    return replace(base, gradients=gradients, step=jax.jit(drop_gradients(step), donate_argnums=0, out_shardings=out))
