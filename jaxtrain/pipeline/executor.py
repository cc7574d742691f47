"""Runs a schedule's table: one SPMD program in which every stage does what its row says, tick by tick.

A scan over ticks. In each, code that is manual over the mesh axis `pipeline` lets every stage choose its action by a
loop of one turn or none; then two permutations, which all stages take part in, hand on what it made. (A permutation
inside of an action would wait for stages that do another one.) What comes before the first layer and after the last
one is computed by all stages together, in ticks that are the same for all: no stage waits for another's head, whose
weights the rules may shard over `pipeline` too.

What F keeps are the residuals of its derivative, so that nothing is computed twice but what `step.remat` says.
Activations, residuals, gradients and sums are Refs, written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.models.model_def import ModelDef, Tree
from jaxtrain.nn.param import float32_proxies, with_proxies
from jaxtrain.nn.stack import Layers
from jaxtrain.pipeline.buffers import Buffers, Inbox, Kind, SlotBuffer, buffers
from jaxtrain.pipeline.partition import Stages
from jaxtrain.pipeline.schedules.table import Action, Table
from jaxtrain.pipeline.schedules.timetable import place
from jaxtrain.pipeline.stage import Derivative, Refs, Stage, StepInputs, Sums, once
from jaxtrain.sharding.rules import PIPELINE_AXIS
from jaxtrain.sharding.sharder import Sharder

STEPS = {"previous": 1, "next": -1, "here": 0}  # where what arrives from a side has to go


@dataclass(frozen=True, eq=False)
class Executor:
    """A table's program, and a model's part in it.

    Args:
        table: of as many stages as the mesh axis `pipeline` has.
        sharder: of the whole mesh.
        whole: the model on the whole mesh, which begins and finishes.
        inside: the model on one slice of `pipeline`, which goes through layers.
        group: layers that only go together.
        given: rows to run instead of the table's, which lead to no loss: for timing.

    Raises:
        UserError: the layers cannot be shared out.
    """

    table: Table
    sharder: Sharder
    model_def: ModelDef
    stage_def: ModelDef
    group: int = 1
    timed_rows: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _ = self.stages  # refused here, not in the first step

    @cached_property
    def forward_only(self) -> Executor:
        """The forward passes alone."""
        orders = [
            [step for _, at, step in self.table.steps() if at == stage and step.action == Action.F]
            for stage in range(self.table.stages)
        ]
        t = self.table
        numbers = {"placement": t.placement, "microbatches": t.microbatches, "chunks": t.chunks}
        return replace(self, table=place(orders, name=f"{t.name}, forward", **numbers), timed_rows=None)

    @property
    def is_training(self) -> bool:
        """True if there is a backward pass."""
        return bool((self.table.action > Action.F).any())

    @cached_property
    def stages(self) -> Stages:
        """Assignment of layers to stages."""
        return Stages(self.table, self.model_def, self.sharder, self.group)

    @cached_property
    def buffers(self) -> Buffers:
        """Slots and ways of the table."""
        return buffers(self.table)

    @cached_property
    def rows(self) -> Mapping[str, Any]:
        """Data that every stage needs in a tick, int32 [ticks, stages]; a slot that is none is the spare one."""
        if self.timed_rows is not None:
            return self.timed_rows
        table, b = self.table, self.buffers
        between = b.backward_to_weight

        def slots(slot: np.ndarray, ring: SlotBuffer | Inbox) -> np.ndarray:
            return np.where(slot < 0, ring.slots, slot)

        rows = {
            "action": table.action,
            "microbatch": table.microbatch,
            "chunk": table.chunk,
            "is first": table.virtual[np.arange(table.stages), table.chunk] == 0,
            "read input": slots(b.activations.read, b.activations),
            "read gradient": slots(b.gradients.read, b.gradients),
            **{f"keep {until}": slots(ring.write, ring) for until, ring in self.rings.items()},
            **{f"read {until}": slots(self._kept_slots(ring), ring) for until, ring in self.rings.items()},
            "keep between": slots(between.write, between),
            "read between": slots(between.read, between),
            "take loss": slots(np.roll(b.from_loss, 1, axis=0), b.gradients),  # found at the end of the tick before
        }
        for side, arrivals in {"previous": b.from_previous, "next": b.from_next, "here": b.from_here}.items():
            for kind, ring in ((Kind.ACTIVATION, b.activations), (Kind.GRADIENT, b.gradients)):
                if (arrivals.kind == kind).any():
                    rows[f"take {side} {kind.name}"] = slots(np.where(arrivals.kind == kind, arrivals.slot, -1), ring)
        return {name: np.asarray(row, np.int32) for name, row in rows.items()}

    @property
    def rings(self) -> dict[str, SlotBuffer]:
        """Slot buffers of the values that F keeps."""
        return {"until B": self.buffers.until_backward, "until W": self.buffers.until_weight}

    def _kept_slots(self, ring: SlotBuffer) -> np.ndarray:
        """int32 [ticks, stages]: where F wrote what a backward action of any kind reads; -1 for none."""
        table = self.table
        found = np.full_like(ring.write, -1)
        for tick, stage, (action, microbatch, chunk) in table.steps():
            if action != Action.F:
                forward = table.when[Action.F, table.virtual[stage, chunk], microbatch]
                found[tick, stage] = ring.write[forward, stage]
        return found

    @cached_property
    def sides(self) -> dict[str, int]:
        """Sides from which anything arrives, and the number of stages that it moves."""
        return {side: step for side, step in STEPS.items() if any(f"take {side} " in name for name in self.rows)}

    @cached_property
    def ends(self) -> dict[str, Any]:
        """Microbatch, int32 [ticks], that begins, that reaches the loss, whose gradient leaves layer 0; -1 for none.

        What never happens is left out.
        """
        table = self.table
        if self.timed_rows is not None:
            return {"begin": jnp.full(len(self.timed_rows["action"]), -1)}

        def microbatch(virtual: int, *actions: Action) -> np.ndarray:
            stage, chunk = table.home[virtual]
            is_it = np.isin(table.action[:, stage], actions) & (table.chunk[:, stage] == chunk)
            return np.where(is_it, table.microbatch[:, stage], -1).astype(np.int32)

        found = {
            "begin": microbatch(0, Action.F),
            "loss": microbatch(-1, Action.F),
            "end": microbatch(0, Action.B, Action.BW),
        }
        return {name: row for name, row in found.items() if (row >= 0).any()}


@dataclass(eq=False)
class PipelineStep:
    """One step of an executor, within a trace.

    Attributes:
        executor: the schedule and the model.
        params: parameters as the model uses them; layers are stacked in their order.
        inputs: microbatches, keys and scales of the step.
    """

    executor: Executor
    params: Tree
    inputs: StepInputs

    def __post_init__(self) -> None:
        stages, self.ends = self.executor.stages, self.executor.ends
        layers, self.edges = stages.split_layers(self.params)
        self.layers = stages.weights(layers)
        self.derivative = Derivative(self.executor.stage_def, stages, self.executor.is_training)
        self.passed = jax.eval_shape(lambda: self._begin(self.edges, 0))  # what goes from stage to stage

    def gradients(self, placed: Callable[[Tree], Tree]) -> tuple[Tree, tuple[Sums, Any]]:
        """Float32 gradients; sums of terms, and counts or None, over all microbatches.

        Args:
            placed: puts gradients, in a tree like `ready`, where they are added up.
        """
        stages = self.executor.stages
        zeros = placed(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.params))
        layers, edges = stages.split_layers(zeros)
        end, edge_grads, rest = self._run(stages.zeros(layers), edges)
        return placed(stages.merge_layers(stages.natural(end.grads), edge_grads)), rest

    def sums(self, head: bool = True) -> tuple[Sums, Any]:
        """Sums of terms, and counts or None, of a plan without a backward pass; `finish`: those of the end too."""
        if not head:
            self.ends = {name: row for name, row in self.ends.items() if name != "loss"}
        return self._run({}, {})[2]

    def _run(self, grads: Any, edge_grads: Any) -> tuple[Refs, Any, tuple[Sums, Any]]:
        """Adds to zeros for gradients. What the Refs hold at the end, gradients of the edges, sums and counts."""
        self.edge_grads = jax.tree.map(jax.new_ref, edge_grads)
        self.edge_sums = {name: jax.new_ref(jnp.zeros(())) for name in self.inputs.scale}
        self.refs = self._refs(grads)
        lax.scan(self._tick, _zeros(self.passed), (dict(self.executor.rows), self.ends))
        end = jax.tree.map(jax.freeze, self.refs)
        sums = {name: jax.freeze(ref) + end.sums.get(name, jnp.zeros(1)).sum() for name, ref in self.edge_sums.items()}
        return end, jax.tree.map(jax.freeze, self.edge_grads), (sums, self.executor.stages.ordered(end.counts) or None)

    def _refs(self, grads: Any) -> Refs:
        """Zeros, in slots and a spare one where there are slots."""
        b, sharder = self.executor.buffers, self.executor.sharder

        def slots(count: int, like: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((count + 1, *x.shape), x.dtype), like)

        def blank(numbers: Layers, layers: Any, step: StepInputs) -> tuple:
            chunks = self.executor.table.chunks
            own = jax.tree.map(lambda x: x[: x.shape[0] // chunks], layers)
            of_one = jax.tree.map(lambda n: n[0, 0], numbers)
            if not (self.executor.stages.is_even or self.derivative.skips(own, of_one, step, self.passed)):
                unequal = f"{self.executor.stages.parts[-1]} layers in unequal parts"
                raise UserError(f"model.type: {unequal} need `run_layers` to pass its `layers` to `nn.stack.scan`")
            shapes = jax.eval_shape(lambda x: self.derivative.forward(own, of_one, step, 0, x), self.passed)
            _, sums, counts, kept = shapes
            between: Any = ()
            if self.executor.table.is_split:
                cut = self.derivative.divide(kept, own, step, self.passed)
                between = (cut.between, [jax.tree.leaves(self.passed)[i] for i in cut.dy])
            rings = self.executor.rings
            kept = [slots(rings[until].slots, x) for until, x in zip(self.derivative.until(len(kept)), kept)]
            return (
                slots(b.activations.slots, self.passed), slots(b.gradients.slots, self.passed),
                kept, slots(b.backward_to_weight.slots, between),
                jax.tree.map(lambda x: jnp.zeros((1,), x.dtype), sums),
                jax.tree.map(lambda x: jnp.zeros((chunks * x.shape[0], *x.shape[1:]), x.dtype), counts),
            )  # fmt: skip

        run = sharder.shard_map(
            blank, (P(PIPELINE_AXIS), P(PIPELINE_AXIS), P()), P(PIPELINE_AXIS), axes=(PIPELINE_AXIS,)
        )
        inputs, gradients, kept, between, sums, counts = run(self.executor.stages.layers, self.layers, self.inputs)
        return jax.tree.map(jax.new_ref, Refs(inputs, gradients, kept, between, grads, sums, counts))

    def _tick(self, late: Any, tick: tuple[dict, dict]) -> tuple[Any, None]:
        """One tick; `late` is the gradient of the loss found in the last one, on its way to the last stage."""
        rows, ends = tick
        begun = self._if("begin", ends, lambda i: self._begin(self.edges, i), self.passed)
        made = self._on_stages(rows, begun, late)
        if "loss" in ends:
            late = self._if("loss", ends, lambda i: self._loss(self._of(made, -1), i), self.passed)
        if "end" in ends:
            self._if("end", ends, lambda i: self._begin_backward(self._of(made, 0), i), None)
        return late, None

    def _on_stages(self, rows: dict[str, Array], begun: Any, late: Any) -> Any:
        """Returns the results of all stages, [stages, ...]."""
        derivative, sides = self.derivative, self.executor.sides

        def stage(
            rows: dict, numbers: Layers, layers: Any, refs: Refs, inputs: StepInputs, begun: Any, late: Any
        ) -> Any:
            row = {name: value[0] for name, value in rows.items()}
            made = Stage(derivative, row, numbers, layers, refs, inputs, begun, late, sides).act()
            return jax.tree.map(lambda m: m[None], made)

        specs = (*[P(PIPELINE_AXIS)] * 4, *[P()] * 3)
        run = self.executor.sharder.shard_map(stage, specs, P(PIPELINE_AXIS), axes=(PIPELINE_AXIS,))
        return run(rows, self.executor.stages.layers, self.layers, self.refs, self.inputs, begun, late)

    def _of(self, made: Any, virtual: int) -> Any:
        """Returns the result of a virtual stage, on all stages."""
        is_its = np.arange(self.executor.table.stages) == self.executor.table.home[virtual, 0]

        def one(x: Array) -> Array:
            # An index would become a permutation, and a sum of bfloat16 inside of a shard_map around all this ends
            # XLA's CPU compiler (see kernels.cross_entropy): a matmul sums.
            own = jnp.where(is_its.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
            return jnp.tensordot(jnp.ones(len(is_its), x.dtype), own, 1)

        return jax.tree.map(one, made)

    def _if(self, end: str, microbatches: dict, run: Callable[[Array], Any], like: Any) -> Any:
        """`run` on the microbatch of an end of the model, or zeros where there is none."""
        return once(end, microbatches[end] >= 0, lambda: run(microbatches[end]), _zeros(like))

    def _model(self, edges: Any) -> Any:
        return self.executor.model_def.bind(self.executor.stages.merge_layers({}, edges))

    def _begin(self, edges: Any, microbatch: Any) -> Any:
        return self._model(edges).embed_inputs(*self.inputs.batch(microbatch))

    def _begin_backward(self, dx: Any, microbatch: Array) -> None:
        _, pull = jax.vjp(
            lambda wide: self._begin(with_proxies(wide, self.edges), microbatch), float32_proxies(self.edges)
        )
        pull.with_refs(self.edge_grads)(dx)

    def _loss(self, x: Any, microbatch: Array) -> Any:
        """Adds the sums of the terms at the model's end, and gradients of its parameters; the gradient of x."""

        def finish(wide: Any, x: Any) -> tuple[Array, Sums]:
            model = self._model(with_proxies(wide, self.edges))
            return self.inputs.weighted(model.head_loss(x, *self.inputs.batch(microbatch)))

        if not self.executor.is_training:
            self._add_sums(finish(self.edges, x)[1])
            return _zeros(x)
        _, pull, sums = jax.vjp(finish, float32_proxies(self.edges), x, has_aux=True)
        self._add_sums(sums)
        dx = jax.tree.map(jax.new_ref, _zeros(x))
        pull.with_refs(self.edge_grads, dx)(jnp.float32(1))
        return jax.tree.map(jax.freeze, dx)

    def _add_sums(self, sums: Sums) -> None:
        for name, value in sums.items():
            self.edge_sums[name][...] += value


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
