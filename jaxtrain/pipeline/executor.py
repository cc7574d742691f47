"""Runs a schedule's table: one SPMD program in which every stage does the action of its column, tick by tick.

A scan over ticks. In each tick, code that is manual over the mesh axis `pipeline` lets every stage choose its action by
a loop of one iteration or none. Then two permutations over all stages send the results. (A permutation inside an action
would wait for stages that run another action.) Embedding and head are computed by all stages together, in ticks that
are the same for all: no stage waits for the head of another, and the rules may shard their weights over `pipeline` too.

F saves the residuals of its derivative, so that only what `step.remat` says is computed twice. Activations, residuals,
gradients and sums are Refs, written in place.
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
from jaxtrain.nn.param import attach_grad_proxies, float32_grad_proxies
from jaxtrain.nn.stack import Layers
from jaxtrain.pipeline.buffers import NO_SLOT, Buffers, Payload, ReceiveBuffer, SlotBuffer, allocate_buffers
from jaxtrain.pipeline.partition import LayerPartition
from jaxtrain.pipeline.schedules.table import Action, Table
from jaxtrain.pipeline.schedules.timetable import build_table
from jaxtrain.pipeline.stage import StageRefs, StageTick, StageVjp, StepInputs, Sums, run_if
from jaxtrain.sharding.rules import PIPELINE_AXIS
from jaxtrain.sharding.sharder import Sharder

SHIFTS = {"previous": 1, "next": -1, "self": 0}  # stages by which a message from each side was sent


@dataclass(frozen=True, eq=False)
class Executor:
    """The program of a table for a model.

    Attributes:
        table: of as many stages as the mesh axis `pipeline` has.
        sharder: of the whole mesh.
        model_def: the model on the whole mesh, which computes embedding and head.
        stage_def: the model on one slice of the pipeline axis, which runs layers.
        group: layers per group; stages hold whole groups.
        timed_instructions: replaces `instructions`, without microbatches that reach embedding or head: for timing.

    Raises:
        UserError: the layers can not be partitioned.
    """

    table: Table
    sharder: Sharder
    model_def: ModelDef
    stage_def: ModelDef
    group: int = 1
    timed_instructions: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _ = self.partition  # raises here, not in the first step

    @cached_property
    def forward_only(self) -> Executor:
        """The executor of the forward passes alone."""
        t = self.table
        orders = [
            [task for _, of, task in t.tasks() if of == stage and task.action == Action.F] for stage in range(t.stages)
        ]
        sizes = {"placement": t.placement, "microbatches": t.microbatches, "chunks": t.chunks}
        return replace(self, table=build_table(orders, name=f"{t.name}, forward", **sizes), timed_instructions=None)

    @property
    def is_training(self) -> bool:
        """True if there is a backward pass."""
        return bool((self.table.action > Action.F).any())

    @cached_property
    def partition(self) -> LayerPartition:
        """Layers of the stages."""
        return LayerPartition(self.table, self.model_def, self.sharder, self.group)

    @cached_property
    def buffers(self) -> Buffers:
        """Slots and receives of the table."""
        return allocate_buffers(self.table)

    @property
    def residual_buffers(self) -> dict[str, SlotBuffer]:
        """Buffers of residuals, by the last action that reads them."""
        return {"B": self.buffers.residuals_until_b, "W": self.buffers.residuals_until_w}

    @cached_property
    def instructions(self) -> Mapping[str, Any]:
        """Numbers that every stage needs in a tick, int32 [ticks, stages]; no slot is the index of the spare entry."""
        if self.timed_instructions is not None:
            return self.timed_instructions
        table, b = self.table, self.buffers

        def slots(slot: np.ndarray, buffer: ReceiveBuffer) -> np.ndarray:
            return np.where(slot < 0, buffer.slots, slot)

        residuals = self.residual_buffers.items()
        instructions = {
            "action": table.action,
            "microbatch": table.microbatch,
            "chunk": table.chunk,
            "is_first": table.virtual_stage[np.arange(table.stages), table.chunk] == 0,
            "read_activation": slots(b.activations.read, b.activations),
            "read_gradient": slots(b.gradients.read, b.gradients),
            **{f"write_residuals_{reader}": slots(buffer.write, buffer) for reader, buffer in residuals},
            **{f"read_residuals_{reader}": slots(self._written_slots(buffer), buffer) for reader, buffer in residuals},
            "write_b_to_w": slots(b.b_to_w.write, b.b_to_w),
            "read_b_to_w": slots(b.b_to_w.read, b.b_to_w),
            # The loss gradient is computed at the end of the previous tick.
            "write_loss_gradient": slots(np.roll(b.loss_gradient, 1, axis=0), b.gradients),
        }
        for side, receives in {"previous": b.from_previous, "next": b.from_next, "self": b.from_self}.items():
            for payload, buffer in ((Payload.ACTIVATION, b.activations), (Payload.GRADIENT, b.gradients)):
                if (is_payload := receives.payload == payload).any():
                    slot = np.where(is_payload, receives.slot, NO_SLOT)
                    instructions[f"receive_{side}_{payload.name}"] = slots(slot, buffer)
        return {name: np.asarray(values, np.int32) for name, values in instructions.items()}

    def _written_slots(self, buffer: SlotBuffer) -> np.ndarray:
        """Returns int32 [ticks, stages]: the slot that the F of each backward action wrote; -1 for none."""
        table = self.table
        written = np.full_like(buffer.write, NO_SLOT)
        for tick, stage, (action, microbatch, chunk) in table.tasks():
            if action != Action.F:
                forward = table.tick_of[Action.F, table.virtual_stage[stage, chunk], microbatch]
                written[tick, stage] = buffer.write[forward, stage]
        return written

    @cached_property
    def shifts(self) -> dict[str, int]:
        """Sides from which stages receive anything, and the number of stages by which the message was sent."""
        used = {name.split("_")[1] for name in self.instructions if name.startswith("receive_")}
        return {side: shift for side, shift in SHIFTS.items() if side in used}

    @cached_property
    def end_microbatches(self) -> dict[str, Any]:
        """int32 [ticks]: microbatch to embed, to compute the loss of, and to backpropagate the embedding of.

        -1 for none; keys that are -1 in all ticks are left out.
        """
        table = self.table
        if self.timed_instructions is not None:
            return {"embed": jnp.full(len(self.timed_instructions["action"]), -1)}

        def microbatch(virtual: int, *actions: Action) -> np.ndarray:
            stage, chunk = table.location[virtual]
            is_it = np.isin(table.action[:, stage], actions) & (table.chunk[:, stage] == chunk)
            return np.where(is_it, table.microbatch[:, stage], -1).astype(np.int32)

        microbatches = {
            "embed": microbatch(0, Action.F),
            "loss": microbatch(-1, Action.F),
            "embed_backward": microbatch(0, Action.B, Action.BW),
        }
        return {name: values for name, values in microbatches.items() if (values >= 0).any()}


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
        self.partition, self.end_microbatches = self.executor.partition, self.executor.end_microbatches
        layers, self.end_params = self.partition.split_layers(self.params)  # end: embedding and head
        self.weights = self.partition.send_weights(layers)
        self.vjp = StageVjp(self.executor.stage_def, self.partition, self.executor.is_training)
        self.message = jax.eval_shape(lambda: self._embed(self.end_params, 0))  # shapes of what stages send

    def gradients(self, to_storage: Callable[[Tree], Tree]) -> tuple[Tree, tuple[Sums, Any]]:
        """Returns float32 gradients; and sums of terms, and counts or None, over all microbatches.

        Args:
            to_storage: constrains gradients, in a tree like the parameters, to where they are accumulated.
        """
        zeros = to_storage(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.params))
        layers, ends = self.partition.split_layers(zeros)
        refs, end_grads, aux = self._run(self.partition.zero_gradients(layers), ends)
        return to_storage(self.partition.merge_layers(self.partition.return_gradients(refs.grads), end_grads)), aux

    def sums(self, head: bool = True) -> tuple[Sums, Any]:
        """Returns sums of terms, and counts or None, of a table without a backward pass.

        Args:
            head: also compute the terms of the head.
        """
        if not head:
            self.end_microbatches = {name: i for name, i in self.end_microbatches.items() if name != "loss"}
        return self._run({}, {})[2]

    def _run(self, grads: Any, end_grads: Any) -> tuple[StageRefs, Any, tuple[Sums, Any]]:
        """Accumulates into the given zeros. Returns the final values of the Refs, end gradients, sums and counts."""
        self.end_grads = jax.tree.map(jax.new_ref, end_grads)
        self.end_sums = {name: jax.new_ref(jnp.zeros(())) for name in self.inputs.scale}
        self.refs = self._init_refs(grads)
        lax.scan(self._tick, _zeros(self.message), (dict(self.executor.instructions), self.end_microbatches))
        final = jax.tree.map(jax.freeze, self.refs)
        sums = {name: jax.freeze(ref) + final.sums.get(name, jnp.zeros(1)).sum() for name, ref in self.end_sums.items()}
        counts = self.partition.in_layer_order(final.counts) or None
        return final, jax.tree.map(jax.freeze, self.end_grads), (sums, counts)

    def _init_refs(self, grads: Any) -> StageRefs:
        """Returns Refs of zeros, with a spare entry after the slots."""
        b, table = self.executor.buffers, self.executor.table

        def zeros(slots: int, like: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((slots + 1, *x.shape), x.dtype), like)

        def init_stage(layers: Layers, weights: Any, inputs: StepInputs) -> tuple:
            chunk_weights = jax.tree.map(lambda x: x[: x.shape[0] // table.chunks], weights)
            chunk_layers = jax.tree.map(lambda n: n[0, 0], layers)
            arguments = chunk_weights, chunk_layers, inputs
            if not (self.partition.is_even or self.vjp.masks_padding(*arguments, self.message)):
                uneven = f"{self.partition.boundaries[-1]} layers in unequal parts"
                raise UserError(f"model.type: {uneven} need `run_layers` to pass its `layers` to `nn.stack.scan`")
            shapes = jax.eval_shape(lambda x: self.vjp.forward(*arguments, 0, x), self.message)
            _, sums, counts, residuals = shapes
            b_to_w: Any = ()
            if table.is_split:
                split = self.vjp.split_pullback(residuals, chunk_weights, inputs, self.message)
                b_to_w = (split.saved, [jax.tree.leaves(self.message)[i] for i in split.w_cotangents])
            buffers = [self.executor.residual_buffers[reader] for reader in self.vjp.last_readers(len(residuals))]
            return (
                zeros(b.activations.slots, self.message), zeros(b.gradients.slots, self.message),
                [zeros(buffer.slots, x) for buffer, x in zip(buffers, residuals)], zeros(b.b_to_w.slots, b_to_w),
                jax.tree.map(lambda x: jnp.zeros((1,), x.dtype), sums),
                jax.tree.map(lambda x: jnp.zeros((table.chunks * x.shape[0], *x.shape[1:]), x.dtype), counts),
            )  # fmt: skip

        run = self._shard_map(init_stage, (P(PIPELINE_AXIS), P(PIPELINE_AXIS), P()))
        activations, gradients, residuals, b_to_w, *sums_counts = run(self.partition.layers, self.weights, self.inputs)
        refs = StageRefs(activations, gradients, residuals, b_to_w, grads, *sums_counts)
        return jax.tree.map(jax.new_ref, refs)

    def _tick(self, loss_gradient: Any, tick: tuple[dict, dict]) -> tuple[Any, None]:
        """Runs one tick. The carry is the loss gradient, which the last stage receives in the next tick."""
        instructions, ends = tick
        embedded = self._run_end("embed", ends, lambda i: self._embed(self.end_params, i), self.message)
        outputs = self._run_stages(instructions, embedded, loss_gradient)
        if "loss" in ends:
            loss_gradient = self._run_end(
                "loss", ends, lambda i: self._loss(self._output(outputs, -1), i), self.message
            )
        if "embed_backward" in ends:
            self._run_end("embed_backward", ends, lambda i: self._embed_backward(self._output(outputs, 0), i), None)
        return loss_gradient, None

    def _run_stages(self, instructions: dict[str, Array], embedded: Any, loss_gradient: Any) -> Any:
        """Runs one tick of all stages. Returns their results, [stages, ...]."""

        def run_stage(
            instructions: dict, layers: Layers, weights: Any, refs: StageRefs, inputs: StepInputs, embedded: Any, g: Any
        ) -> Any:
            instruction = {name: value[0] for name, value in instructions.items()}
            shifts = self.executor.shifts
            stage = StageTick(self.vjp, instruction, layers, weights, refs, inputs, embedded, g, shifts)
            return jax.tree.map(lambda y: y[None], stage.run())

        run = self._shard_map(run_stage, (*[P(PIPELINE_AXIS)] * 4, *[P()] * 3))
        return run(instructions, self.partition.layers, self.weights, self.refs, self.inputs, embedded, loss_gradient)

    def _shard_map(self, body: Callable, in_specs: tuple) -> Callable:
        return self.executor.sharder.shard_map(body, in_specs, P(PIPELINE_AXIS), axes=(PIPELINE_AXIS,))

    def _output(self, outputs: Any, virtual: int) -> Any:
        """Broadcasts the result of the stage that holds a virtual stage to all stages."""
        is_source = np.arange(self.executor.table.stages) == self.executor.table.location[virtual, 0]

        def broadcast(x: Array) -> Array:
            # An index would become a permutation, and a bfloat16 sum inside a shard_map that encloses this crashes
            # XLA's CPU compiler (see kernels.cross_entropy): a matmul sums.
            masked = jnp.where(is_source.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
            return jnp.tensordot(jnp.ones(len(is_source), x.dtype), masked, 1)

        return jax.tree.map(broadcast, outputs)

    def _run_end(self, name: str, microbatches: dict, run: Callable[[Array], Any], like: Any) -> Any:
        """Returns `run` of the microbatch of embedding or head in this tick, or zeros if there is none."""
        return run_if(name, microbatches[name] >= 0, lambda: run(microbatches[name]), _zeros(like))

    def _model(self, end_params: Any) -> Any:
        return self.executor.model_def.bind(self.partition.merge_layers({}, end_params))

    def _embed(self, end_params: Any, microbatch: Any) -> Any:
        return self._model(end_params).embed_inputs(*self.inputs.batch(microbatch))

    def _embed_backward(self, dx: Any, microbatch: Array) -> None:
        """Accumulates the gradients of the embedding."""

        def embed(proxies: Any) -> Any:
            return self._embed(attach_grad_proxies(proxies, self.end_params), microbatch)

        _, pullback = jax.vjp(embed, float32_grad_proxies(self.end_params))
        pullback.with_refs(self.end_grads)(dx)

    def _loss(self, x: Any, microbatch: Array) -> Any:
        """Accumulates the terms of the head and the gradients of its parameters. Returns the gradient of `x`."""

        def head_loss(proxies: Any, x: Any) -> tuple[Array, Sums]:
            model = self._model(attach_grad_proxies(proxies, self.end_params))
            return self.inputs.weighted(model.head_loss(x, *self.inputs.batch(microbatch)))

        if not self.executor.is_training:
            self._add_sums(head_loss(self.end_params, x)[1])
            return _zeros(x)
        _, pullback, sums = jax.vjp(head_loss, float32_grad_proxies(self.end_params), x, has_aux=True)
        self._add_sums(sums)
        dx = jax.tree.map(jax.new_ref, _zeros(x))
        pullback.with_refs(self.end_grads, dx)(jnp.float32(1))
        return jax.tree.map(jax.freeze, dx)

    def _add_sums(self, sums: Sums) -> None:
        for name, value in sums.items():
            self.end_sums[name][...] += value


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
