"""Mixture of experts: routing (global), transports (per device), and the call that puts them together."""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.moe.device_group import Group
from jaxtrain.kernels.moe.grouped_matmul import Hidden, Weights
from jaxtrain.kernels.moe.routing import Routing
from jaxtrain.kernels.moe.token_dispatcher import DispatchSpec, dropless, padded
from jaxtrain.sharding.rules import BATCH, CONTEXT, EXPERT, SEQUENCE
from jaxtrain.sharding.sharder import Sharder

BLOCK = 512  # rows of one matmul of a dropless expert
CPU_BLOCK = 16
INNER, DOWN = (EXPERT, "embed", "mlp"), (EXPERT, "mlp", "embed")  # names of the dims of the weights


def experts(
    x_BTD: Array,
    routing: Routing,
    weights: Weights,
    *,
    hidden: Hidden,
    places: int | None,
    sharder: Sharder,
) -> Array:
    """The chosen experts' outputs times their gates, added up, for every token; zeros where it was not routed.

    Exactly the sum that one device would compute, on any layout: tokens travel to the experts along the axes of
    `expert`, and each expert's width may be split over those of `mlp`. Where the residual stream is split over these
    too (sequence parallelism), tokens come and go split.

    Args:
        x_BTD: tokens [batch, time, embed] in the compute dtype.
        routing: from `route`.
        weights: of all experts in the compute dtype, as stored: (gate and up or up alone [E, D, F]), down [E, F, D].
            Those of a device's experts are gathered inside, so that their gradient is reduced into the shards.
        hidden: hidden activations of gate and up, or of up.
        places: of an expert per sequence, where the routing had a capacity; None is dropless.
        sharder: placement. The axes of `expert` must be among those of `batch`.

    Returns:
        [batch, time, embed] in the dtype of `x_BTD`.
    """
    devices, split = Group.of(sharder, EXPERT), Group.of(sharder, "mlp")
    mesh, context = sharder.mesh, sharder.axes(CONTEXT)
    run = dropless if places is None else padded
    is_cpu = (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform == "cpu"
    shards = sharder.size(CONTEXT) * split.size
    is_spread = places is None and devices.size > 1 and split.size > 1 and x_BTD.shape[1] % shards == 0
    in_stream = split.size > 1 and sharder.axes(SEQUENCE) == (*context, *sharder.axes("mlp"))
    block, count = CPU_BLOCK if is_cpu else BLOCK, weights[1].shape[0]
    plan = DispatchSpec(hidden, count, places, devices, split, is_spread, block, not is_cpu)
    if mesh is None:
        return run(plan, x_BTD, routing, weights)

    stored = Group.along(sharder, sharder.dims(INNER)[1])

    def local(x_BTD: Array, routing: Routing, weights: Weights) -> Array:
        weights = tuple(stored.gather(w, 1) for w in weights[0]), stored.gather(weights[1], 2)
        if is_spread:
            return run(plan, x_BTD, routing, weights)
        y_BTD = run(plan, split.gather(x_BTD, 1) if in_stream else x_BTD, routing, weights)
        return split.scatter(y_BTD, 1) if in_stream else split.sum(y_BTD)

    tokens = (*context, *split.axes) if is_spread or in_stream else context
    x_spec, choice_spec = (P(sharder.axes(BATCH), t, None) for t in (tokens, tokens if is_spread else context))
    # A prefix of the routing: one place for whatever it holds.
    specs = (x_spec, choice_spec, (sharder.spec(INNER), sharder.spec(DOWN)))
    return sharder.shard_map(local, specs, x_spec)(x_BTD, routing, weights)
