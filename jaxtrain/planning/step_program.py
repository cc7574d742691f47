"""Train step of a config, compiled but not run, and figures of its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.core.batch_spec import batch_spec
from jaxtrain.core.placement import batch_sharding
from jaxtrain.core.program import Program
from jaxtrain.kernels.cross_entropy import recomputes
from jaxtrain.models.flops import user_flops
from jaxtrain.models.spec import has_token_rows, is_decoder
from jaxtrain.planning.cost.memory import shard_size
from jaxtrain.planning.hardware import network, simulated, targets
from jaxtrain.precision.policy import POLICIES
from jaxtrain.sharding.quantized_blocks import Bits
from jaxtrain.sharding.rules import DATA_AXIS, LAYERS, dims_without_axes, storage_axes
from jaxtrain.sharding.sharder import Dims
from jaxtrain.sync.quantized_mean import BITS, is_sent_in_blocks, message_bytes
from jaxtrain.sync.synchronizer import RoundBytes


def abstract_batch(program: Program, example: Mapping[str, Any] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a global batch.

    Args:
        program: of the config.
        example: a batch of the dataset, of any number of rows; default: packed tokens of the config's length.

    Raises:
        UserError: a user's own dataset without an example.
    """
    data = program.config.data
    has_tokens = has_token_rows(program.config.model, data)
    return {
        name: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=batch_sharding(program.sharder, len(spec.shape), has_tokens)
        )
        for name, spec in batch_spec(data, data.global_batch, example).items()
    }


def weight_and_gradient_bytes(program: Program) -> dict[str, int]:
    """Bytes per device of gathered weights and of gradients, which a step holds besides the train state.

    Returns:
        `weights`: copies gathered over the replicas for the whole step (ZeRO 1 and 2). `gathered`: one layer's weights,
        gathered for its computation. `gradients`: of the step, float32 if accumulated.
    """
    sharder, model_def, gradients = program.sharder, program.model_def, program.gradients
    sizes = {} if sharder.mesh is None else dict(sharder.mesh.shape)
    inner = sharder if gradients.replica_model_def is None else sharder.without_axis(DATA_AXIS)
    rules = sharder.rules or {}
    out = {"weights": 0, "gathered": 0, "gradients": 0}

    def count(param: Any, names: Any, gather_dtype: Any, gradient: Any) -> None:
        def elements(dims: Dims) -> int:
            return shard_size(param.shape, [prod(sizes[axis] for axis in axes) for axes in dims])

        placed = sharder.compute_dims(names, param.shape)
        is_gathered = sharder.storage_dims(names, param.shape) != placed
        out["weights"] += jnp.dtype(gather_dtype).itemsize * elements(placed) * is_gathered
        if names[:1] == (LAYERS,) and (over := storage_axes(rules, names) & set(sum(placed, ()))):
            layer = elements(dims_without_axes(names, over, rules)) // param.shape[0] * max(1, sharder.size(LAYERS))
            out["gathered"] += jnp.dtype(gather_dtype).itemsize * layer
        itemsize = gradient.dtype.itemsize if gradients.is_one_pass else 4
        out["gradients"] += itemsize * elements(inner.storage_dims(names, param.shape))

    proxies = jax.eval_shape(gradients.grad_proxies, model_def.params)
    jax.tree.map(count, model_def.params, model_def.names, model_def.gather_dtypes, proxies)
    return out


def tree_bytes(program: Program) -> dict[str, int]:
    """Bytes of whole trees, of all devices together, that islands push or read.

    Returns:
        `gradients`: of a step, float32 if they are accumulated or scaled. `params`: the parameters. `mutable`: mutable
        variables with fractions. `mean`: means of the parameters, float32; `mutable mean`: of those variables.
        And of each format of `sync.compress`, such as `gradients int8`: `gradients` and `changes` of parameters in it,
        the `message` of an update, `params` that islands read at once, and the `mean` of changes without a server.
    """
    one, gradients = program.one, program.gradients
    is_float32 = not gradients.is_one_pass or "scaling" in one

    def count(tree: Any, itemsize: int | None = None) -> int:
        return sum(leaf.size * (itemsize or leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree))

    fractions = [leaf for leaf in jax.tree.leaves(one.get("mutable", {})) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    params = one["params"]
    found = {
        "gradients": count(params, 4 if is_float32 else None), "params": count(params), "mutable": count(fractions),
        "mean": count(params, 4), "mutable mean": count(fractions, 4),
    }  # fmt: skip
    for name, bits in BITS.items():
        if bits:
            found |= {
                f"{what} {name}": size for what, size in _rounded_bytes(jax.tree.leaves(params), is_float32, bits)
            }
    return found


def _rounded_bytes(params: list[Any], is_float32: bool, bits: Bits) -> list[tuple[str, int]]:
    """Returns bytes of parameters in few bits, as `tree_bytes` names them; small ones travel as they are."""
    total = dict.fromkeys(("gradients", "changes", "message", "params", "mean"), 0)
    for leaf in params:
        shard, itemsize = leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize
        each = {"gradients": 4 if is_float32 else itemsize, "changes": 4, "mean": 4}
        each |= {"message": itemsize, "params": itemsize}
        sizes = {name: leaf.size * size for name, size in each.items()}
        if is_sent_in_blocks(leaf.shape, leaf.dtype, shard, bits):
            sizes["gradients"] = sizes["changes"] = message_bytes(shard, bits) * (leaf.size // prod(shard))
            sizes["mean"] = message_bytes(leaf.shape, bits)
        if is_sent_in_blocks(leaf.shape, leaf.dtype, leaf.shape, bits):
            sizes |= {"message": message_bytes(leaf.shape, bits), "params": 4 * leaf.size}
        total = {name: size + sizes[name] for name, size in total.items()}
    return list(total.items())


def device_positions(program: Program, target: str) -> list[network.DevicePosition]:
    """Positions of the devices of the mesh on a target."""
    mesh = program.sharder.mesh
    return [] if mesh is None else network.device_positions(targets.parse(target), list(mesh.devices.flat))


def recomputes_logits(program: Program) -> bool:
    """Returns whether the decoder's loss recomputes its logits in the backward pass."""
    config, vocab = program.config, embedding_rows(program)
    return vocab is not None and recomputes(vocab, config.loss.vocab_chunks, program.sharder)


def embedding_rows(program: Program) -> int | None:
    """Rows of the decoder's embedding table; None for a user's own model."""
    return program.model_def.parameters["embed"]["table"].shape[0] if is_decoder(program.config.model) else None


def user_step_flops(program: Program) -> float | None:
    """FLOPs of a step of a user's own model on text, if the model counts them; else None."""
    data = program.config.data
    if is_decoder(program.config.model) or not data.is_text:
        return None
    shapes = {name: spec.shape for name, spec in batch_spec(data, data.global_batch).items()}
    flops = user_flops(program.model_def.abstract(), shapes, 1)
    return None if flops is None else flops.model


def exchange_bytes(program: Program) -> RoundBytes:
    """Bytes that a device sends in exchanges of replicas that agree loosely; 0 for `bsp`, whose step has them."""
    synchronizer = program.synchronizer
    if synchronizer.replicas is None:
        return RoundBytes()
    devices = 1 if program.sharder.mesh is None else program.sharder.mesh.size // synchronizer.replicas
    found = synchronizer.round_bytes()
    return RoundBytes(found.total / devices, found.most / devices, found.during / devices, found.sending)


def bytes_of_phases(program: Program) -> list[tuple[int, float]]:
    """Phases of a strategy that begins with another one: (end, bytes that a device sends in a step); else none."""
    strategy, params, steps = program.synchronizer.strategy, program.one["params"], program.config.steps
    devices = 1 if program.sharder.mesh is None else program.sharder.mesh.size // strategy.replicas
    phases = [*strategy.phases, (steps, strategy)] if strategy.combines_gradients and strategy.phases else []
    return [(min(end, steps), each.sent_bytes(params, None) / devices) for end, each in phases]


def cpu_rates(devices: Sequence[Any], precision: str) -> dict[str, float] | None:
    """Measured rates of CPU devices, see `hardware.simulated`; None for other chips."""
    return simulated.measure_rates(devices, POLICIES[precision].compute) if devices[0].platform == "cpu" else None


def compile_step(program: Program, example: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles `program.step` for the program's devices, present or not; `example` as in `abstract_batch`."""
    step: Any = program.step  # jitted
    return step.lower(program.state, abstract_batch(program, example)).compile()
