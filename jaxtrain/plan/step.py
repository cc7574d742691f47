"""The real train step, compiled but not run."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import UserError
from jaxtrain.mesh.context import has_tokens
from jaxtrain.mesh.rules import REPLICAS
from jaxtrain.mesh.sharding import Dims
from jaxtrain.plan.communication import divergent_permutes
from jaxtrain.plan.memory import shard_size
from jaxtrain.train.batches import batch_sharding
from jaxtrain.train.program import Program

TOKENS = {"tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "segments": jnp.int32}


def abstract_batch(program: Program, example: Mapping[str, Any] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a global batch.

    Args:
        example: arrays as the data give them, of any number of rows; default: packed tokens of the config's length.

    Raises:
        UserError: a user's own data without an example.
    """
    data = program.config.data
    if example is None:
        if data.type != "text":
            raise UserError(f"data.type {data.type}: the step of a user's own data is compiled from an example batch")
        shapes = {name: ((data.sequence,), kind) for name, kind in (TOKENS | {"weights": jnp.float32}).items()}
    else:
        shapes = {name: (rows.shape[1:], rows.dtype) for name, rows in example.items()}
    return {
        name: jax.ShapeDtypeStruct(
            (data.global_batch, *shape), kind,
            sharding=batch_sharding(program.sharder, 1 + len(shape), has_tokens(program.config)),
        )
        for name, (shape, kind) in shapes.items()
    }  # fmt: skip


def held_bytes(program: Program) -> dict[str, int]:
    """Bytes per device that a step keeps besides the train state and activations.

    weights: copies gathered over the replicas for the whole step (ZeRO 1 and 2). gradients: of the step, float32, where
    they are added up.
    """
    sharder, definition, gradients = program.sharder, program.definition, program.gradients
    sizes = {} if sharder.mesh is None else dict(sharder.mesh.shape)
    inner = sharder if gradients.local is None else sharder.without(REPLICAS)

    out = {"weights": 0, "gradients": 0}

    def count(param: Any, names: Any, travels: Any) -> None:
        def elements(dims: Dims) -> int:
            return shard_size(param.shape, [prod(sizes[axis] for axis in axes) for axes in dims])

        placed = sharder.placed(names, param.shape)
        is_gathered = sharder.stored(names, param.shape) != placed
        out["weights"] += jnp.dtype(travels).itemsize * elements(placed) * is_gathered
        out["gradients"] += max(4, param.dtype.itemsize) * elements(inner.stored(names, param.shape))

    jax.tree.map(count, definition.params, definition.names, definition.travels)
    return out


def without_permutes_in_branches(step: Any) -> Any:
    """The jitted step of a pipeline; its first call raises UserError where the compiled program could hang.

    Stages do different actions in a tick, and a collective-permute waits for all devices: the CPU backend
    for ever, see `divergent_permutes`. The partitioner makes them too, e.g. of a rule for `head_dim`.
    """
    compiled: list[Any] = []

    def run(state: Any, batch: Any) -> Any:
        if not compiled:
            compiled.append(step.lower(state, batch).compile())
            if found := divergent_permutes(compiled[0].as_text() or ""):
                what = f"{len(found)} permutations that not all stages would take part in, the first {found[0]}"
                expected = "expected a layout without (no rule for head_dim, no context: ring)"
                raise UserError(f"mesh.pipeline: the compiled step has {what}; {expected}")
        return compiled[0](state, batch)

    return run


def compiled_step(program: Program, example: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """`program.step` compiled for the program's devices, which need not be there."""
    step: Any = program.step  # jitted
    return step.lower(program.state, abstract_batch(program, example)).compile()
