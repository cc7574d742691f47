"""Dispatch of tokens to experts and back, on one device, by two methods with equal results.

`padded` sends the capacity of every expert and sequence in an all-to-all: the sizes are static, and the routing has
dropped choices beyond the capacity. `dropless` sends the rows of all choices, of sizes known at run time.
Shapes: B rows of the batch and T tokens of them on this device, K choices, E experts, M of them on this device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.moe.device_group import DeviceGroup
from jaxtrain.kernels.moe.grouped_matmul import Hidden, Weights, feed_forward, grouped
from jaxtrain.kernels.moe.ragged_all_to_all import ExchangeSizes, exchange, rotation_sizes
from jaxtrain.kernels.moe.routing import Routing, expert_ranks
from jaxtrain.kernels.moe.token_gather import combine, dispatch, row_map
from jaxtrain.sharding.sharder import Sharder


@dataclass(frozen=True)
class DispatchSpec:
    """Static options of a dispatch.

    Attributes:
        hidden: hidden activations of an expert.
        experts: number of experts on all devices.
        capacity: tokens per expert and sequence; None is dropless.
        devices: devices that shard the experts.
        split: devices that shard the width of each expert.
        is_spread: tokens are sharded over `split` too.
        block: rows of one matmul of `dropless`.
        native: the platform supports `ragged_all_to_all`.
    """

    hidden: Hidden
    experts: int
    capacity: int | None
    devices: DeviceGroup
    split: DeviceGroup
    is_spread: bool
    block: int
    native: bool


def padded(spec: DispatchSpec, x_BTD: Array, routing: Routing, weights: Weights) -> Array:
    """Returns [B, T, D], to be summed over `spec.split`.

    If the experts are on several devices, each device of `split` sends its share of the capacity: no token is sent
    twice over the network of the experts; tokens are gathered and reduced within `split`.
    """
    B, T, D = x_BTD.shape
    split = spec.split if spec.devices.size > 1 else DeviceGroup()
    width = -(-cast(int, spec.capacity) // split.size)
    slot_BTK = cast(Array, routing.slot_BTK) - split.index() * width
    is_here = (slot_BTK >= 0) & (slot_BTK < width) & (routing.expert_BTK < spec.experts)
    row_BTK = (routing.expert_BTK * B + jnp.arange(B)[:, None, None]) * width + slot_BTK
    rows = row_map(jnp.where(is_here, row_BTK, -1).reshape(-1), spec.experts * B * width)
    x_ERD = dispatch(x_BTD.reshape(B * T, D), rows).reshape(spec.experts, B * width, D)
    x_MRD = split.gather(spec.devices.all_to_all(x_ERD, 0, 1), 1)
    y_MRD = split.scatter(feed_forward(spec.hidden, x_MRD, weights), 1)
    y_ERD = spec.devices.all_to_all(y_MRD, 1, 0)
    return combine(y_ERD.reshape(-1, D), routing.gate_BTK.reshape(B * T, -1), rows).reshape(B, T, D)


def dropless(spec: DispatchSpec, x_BTD: Array, routing: Routing, weights: Weights) -> Array:
    """Returns [B, T, D], to be summed over `spec.split` unless `spec.is_spread`."""
    B, T, D = x_BTD.shape
    expert_A = routing.expert_BTK.reshape(-1)
    count_E = jnp.sum(expert_A[:, None] == jnp.arange(spec.experts), 0, dtype=jnp.int32)
    rank_A = expert_ranks(expert_A.reshape(1, -1, 1), spec.experts, None, Sharder()).reshape(-1)
    gate_TK = routing.gate_BTK.reshape(B * T, -1)
    x_TD = x_BTD.reshape(B * T, D)
    if spec.devices.size == 1:
        start_E = _starts(_round_up(count_E, spec.block))
        rows = row_map(_row(start_E, expert_A, rank_A), _padded_rows(expert_A.size, spec.experts, spec.block))
        x_RD = dispatch(x_TD, rows)
        y_RD = grouped(spec.hidden, spec.block, x_RD, weights, start_E, count_E)
        return combine(y_RD, gate_TK, rows).reshape(B, T, D)
    rows = row_map(_row(_starts(count_E), expert_A, rank_A), expert_A.size)
    forward, inverse, start_M, size_M = _exchange_sizes(spec, count_E)
    max_choices = B * T * min(gate_TK.shape[1], start_M.size)  # choices of one device that one device can receive
    max_rows = _padded_rows(spec.devices.size * max_choices, start_M.size, spec.block)
    x_RD: Any = exchange(spec.devices, spec.native, max_rows, dispatch(x_TD, rows), forward, inverse)
    y_RD = _run_local_experts(spec, x_RD, weights, start_M, size_M)
    y_AD = exchange(spec.devices, spec.native, expert_A.size, y_RD, inverse, forward)
    return combine(y_AD, gate_TK, rows).reshape(B, T, D)


def _run_local_experts(spec: DispatchSpec, x_RD: Array, weights: Weights, start_M: Array, size_M: Array) -> Array:
    """Computes the local experts on the received rows.

    If tokens are spread, every device of `split` sends its rows to each other one, which has another part of the width,
    and sums their results in float32. It does so one device after the other, by runs: a gather would send whole
    buffers, which are as large as the worst case, and hold those of all devices at once.
    """

    def outputs(x_RD: Array, start_M: Array, size_M: Array) -> Array:
        return cast(Array, grouped(spec.hidden, spec.block, x_RD, weights, start_M, size_M))

    y_RD = outputs(x_RD, start_M, size_M)
    if not spec.is_spread:
        return y_RD
    split, max_rows = spec.split, x_RD.shape[0]
    start_NM, size_NM = (split.gather(table[None], 0) for table in (start_M, size_M))
    sum_RD = y_RD.astype(jnp.float32)
    for hop in range(1, split.size):
        forward, inverse, source = rotation_sizes(split, hop, start_NM, size_NM)
        received_RD: Any = exchange(split, spec.native, max_rows, x_RD, forward, inverse)
        y_RD = outputs(received_RD, start_NM[source], size_NM[source])
        returned_RD: Any = exchange(split, spec.native, max_rows, y_RD, inverse, forward)
        sum_RD += returned_RD.astype(jnp.float32)
    return sum_RD.astype(x_RD.dtype)


def _exchange_sizes(spec: DispatchSpec, count_E: Array) -> tuple[ExchangeSizes, ExchangeSizes, Array, Array]:
    """Returns the sizes of the exchange and of its inverse, and start and rows of each local expert.

    Starts are multiples of the block. The rows of a device are sorted by expert; those of an expert are sorted by the
    device that sent them.
    """
    devices, me = spec.devices, spec.devices.index()
    count_NE = devices.gather(count_E[None], 0)
    local = spec.experts // devices.size
    of_device = lambda table, dim: lax.dynamic_slice_in_dim(table, me * local, local, dim)  # noqa: E731
    size_E = count_NE.sum(0)
    start_E = _starts(_round_up(size_E, spec.block).reshape(devices.size, local)).reshape(-1)
    begin_NE = _starts(count_NE)
    output_NE = start_E + _starts(count_NE.T).T  # after the rows of earlier devices
    begin_E, output_E = (lax.dynamic_index_in_dim(table, me, 0, keepdims=False) for table in (begin_NE, output_NE))
    received = of_device(count_NE, 1).reshape(-1)
    forward = ExchangeSizes(begin_E, count_E, output_E, received)
    inverse = ExchangeSizes(of_device(output_NE, 1).reshape(-1), received, of_device(begin_NE, 1).reshape(-1), count_E)
    return forward, inverse, of_device(start_E, 0), of_device(size_E, 0)


def _starts(size: Array) -> Array:
    """Returns the starts of consecutive runs of these sizes along the last dim."""
    return jnp.cumsum(size, -1, dtype=jnp.int32) - size


def _round_up(size: Array, block: int) -> Array:
    return -(-size // block) * block


def _row(start_E: Array, expert_A: Array, rank_A: Array) -> Array:
    """Returns the row of every choice, -1 for dropped ones."""
    return jnp.where(expert_A < start_E.size, start_E.at[expert_A].get(mode="clip") + rank_A, -1)


def _padded_rows(rows: int, groups: int, block: int) -> int:
    """Returns the rows that hold any split of `rows` into groups of whole blocks."""
    return -(-rows // block) * block + groups * block
