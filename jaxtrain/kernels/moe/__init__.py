"""Mixture of experts: global routing of tokens, and their dispatch to the devices of the experts."""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.moe.device_group import DeviceGroup
from jaxtrain.kernels.moe.grouped_matmul import Hidden, Weights
from jaxtrain.kernels.moe.routing import Routing
from jaxtrain.kernels.moe.token_dispatcher import DispatchSpec, dropless, padded
from jaxtrain.sharding.rules import BATCH, CONTEXT, EXPERT, SEQUENCE
from jaxtrain.sharding.sharder import Sharder

BLOCK = 512  # rows of one matmul of a dropless expert
CPU_BLOCK = 16
INNER, DOWN = (EXPERT, "embed", "mlp"), (EXPERT, "mlp", "embed")  # logical names of the weights' dims


def run_experts(
    x_BTD: Array,
    routing: Routing,
    weights: Weights,
    *,
    hidden: Hidden,
    capacity: int | None,
    sharder: Sharder,
) -> Array:
    """Returns the sum of the chosen experts' outputs times their gates, for every token; zeros if it was not routed.

    Every layout computes the same sum. Tokens are sent to the experts along the axes of `expert`, and the width of each
    expert may be sharded over those of `mlp`. If the residual stream is sharded over these too (sequence parallelism),
    so are the tokens.

    Args:
        x_BTD: tokens [batch, time, embed] in the compute dtype.
        routing: from `route`.
        weights: of all experts in the compute dtype, with storage sharding: (gate and up or up alone [E, D, F]), down
            [E, F, D]. Those of a device's experts are gathered inside, so that their gradient is reduced into shards.
        hidden: hidden activations of gate and up, or of up.
        capacity: tokens per expert and sequence (`expert_capacity`); None is dropless.
        sharder: mesh and rules. The axes of `expert` must be among those of `batch`.

    Returns:
        [batch, time, embed] in the dtype of `x_BTD`.
    """
    devices, split = DeviceGroup.of(sharder, EXPERT), DeviceGroup.of(sharder, "mlp")
    mesh, context = sharder.mesh, sharder.axes(CONTEXT)
    run = dropless if capacity is None else padded
    is_cpu = (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform == "cpu"
    shards = sharder.size(CONTEXT) * split.size
    is_spread = capacity is None and devices.size > 1 and split.size > 1 and x_BTD.shape[1] % shards == 0
    is_stream_sharded = split.size > 1 and sharder.axes(SEQUENCE) == (*context, *sharder.axes("mlp"))
    block, count = CPU_BLOCK if is_cpu else BLOCK, weights[1].shape[0]
    spec = DispatchSpec(hidden, count, capacity, devices, split, is_spread, block, not is_cpu)
    if mesh is None:
        return run(spec, x_BTD, routing, weights)

    stored = DeviceGroup.along(sharder, sharder.dims(INNER)[1])

    def local(x_BTD: Array, routing: Routing, weights: Weights) -> Array:
        weights = tuple(stored.gather(w, 1) for w in weights[0]), stored.gather(weights[1], 2)
        if is_spread:
            return run(spec, x_BTD, routing, weights)
        y_BTD = run(spec, split.gather(x_BTD, 1) if is_stream_sharded else x_BTD, routing, weights)
        return split.scatter(y_BTD, 1) if is_stream_sharded else split.sum(y_BTD)

    tokens = (*context, *split.axes) if is_spread or is_stream_sharded else context
    x_spec, choice_spec = (P(sharder.axes(BATCH), t, None) for t in (tokens, tokens if is_spread else context))
    # The spec of the routing is a prefix of its tree.
    specs = (x_spec, choice_spec, (sharder.spec(INNER), sharder.spec(DOWN)))
    return sharder.shard_map(local, specs, x_spec)(x_BTD, routing, weights)
