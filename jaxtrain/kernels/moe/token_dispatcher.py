"""Dispatch of tokens to experts and back, on one device: two transports that give the same numbers.

`padded` sends a fixed number of places per expert and sequence in an all-to-all: the sizes are static, and choices
without a place were dropped by the routing. `dropless` sends runs of rows, as many as there are.
Shapes: B rows of the batch and T tokens of them on this device, K choices, E experts, M of them on this device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.moe.device_group import Group
from jaxtrain.kernels.moe.grouped_matmul import Hidden, Weights, feed_forward, grouped
from jaxtrain.kernels.moe.ragged_all_to_all import ExchangeSizes, exchange, rotation
from jaxtrain.kernels.moe.routing import Routing, ranks
from jaxtrain.kernels.moe.token_gather import combine, dispatch, places_of
from jaxtrain.sharding.sharder import Sharder


@dataclass(frozen=True)
class DispatchSpec:
    """Static options of a transport.

    experts: of all devices. places: of an expert per sequence, or None without a capacity. devices: share the
    experts. split: share the width of each expert. is_spread: tokens come split over `split` too. block: rows of one
    matmul of `dropless`. native: the platform has `ragged_all_to_all`.
    """

    hidden: Hidden
    experts: int
    places: int | None
    devices: Group
    split: Group
    is_spread: bool
    block: int
    native: bool


def padded(plan: DispatchSpec, x_BTD: Array, routing: Routing, weights: Weights) -> Array:
    """[B, T, D], to be summed over `plan.split`.

    Where the experts are on several devices, each member of `split` carries its share of the places: the same tokens
    never travel twice over the network of the experts, but are gathered and reduced among the members.
    """
    B, T, D = x_BTD.shape
    members = plan.split if plan.devices.size > 1 else Group()
    width = -(-cast(int, plan.places) // members.size)
    slot_BTK = cast(Array, routing.slot_BTK) - members.index() * width
    is_here = (slot_BTK >= 0) & (slot_BTK < width) & (routing.expert_BTK < plan.experts)
    row_BTK = (routing.expert_BTK * B + jnp.arange(B)[:, None, None]) * width + slot_BTK
    places = places_of(jnp.where(is_here, row_BTK, -1).reshape(-1), plan.experts * B * width)
    x_ERD = dispatch(x_BTD.reshape(B * T, D), places).reshape(plan.experts, B * width, D)
    x_MRD = members.gather(plan.devices.swap(x_ERD, 0, 1), 1)
    y_MRD = members.scatter(feed_forward(plan.hidden, x_MRD, weights), 1)
    y_ERD = plan.devices.swap(y_MRD, 1, 0)
    return combine(y_ERD.reshape(-1, D), routing.gate_BTK.reshape(B * T, -1), places).reshape(B, T, D)


def dropless(plan: DispatchSpec, x_BTD: Array, routing: Routing, weights: Weights) -> Array:
    """[B, T, D]; to be summed over `plan.split` unless `plan.is_spread`."""
    B, T, D = x_BTD.shape
    expert_A = routing.expert_BTK.reshape(-1)
    count_E = jnp.sum(expert_A[:, None] == jnp.arange(plan.experts), 0, dtype=jnp.int32)
    rank_A = ranks(expert_A.reshape(1, -1, 1), plan.experts, None, Sharder()).reshape(-1)
    gate_TK = routing.gate_BTK.reshape(B * T, -1)
    x_TD = x_BTD.reshape(B * T, D)
    if plan.devices.size == 1:
        start_E = _starts(_whole_blocks(count_E, plan.block))
        places = places_of(_row(start_E, expert_A, rank_A), _room(expert_A.size, plan.experts, plan.block))
        rows = dispatch(x_TD, places)
        y_RD = grouped(plan.hidden, plan.block, rows, weights, start_E, count_E)
        return combine(y_RD, gate_TK, places).reshape(B, T, D)
    places = places_of(_row(_starts(count_E), expert_A, rank_A), expert_A.size)
    there, back, start_M, size_M = _itinerary(plan, count_E)
    most = B * T * min(gate_TK.shape[1], start_M.size)  # choices of one device that one device can get
    room = _room(plan.devices.size * most, start_M.size, plan.block)
    rows: Any = exchange(plan.devices, plan.native, room, dispatch(x_TD, places), there, back)
    y_RD = _on_experts(plan, rows, weights, start_M, size_M)
    y_AD = exchange(plan.devices, plan.native, expert_A.size, y_RD, back, there)
    return combine(y_AD, gate_TK, places).reshape(B, T, D)


def _on_experts(plan: DispatchSpec, rows: Array, weights: Weights, start_M: Array, size_M: Array) -> Array:
    """The local experts on what arrived.

    Where tokens are spread, every member hands its rows to each other one, which has another part of the width, and
    adds up in float32 what they return. One member after the other, in runs: a gather would send whole buffers, which
    have room for all that could come, and hold those of all members at once.
    """

    def outputs(x_RD: Array, start_M: Array, size_M: Array) -> Array:
        return cast(Array, grouped(plan.hidden, plan.block, x_RD, weights, start_M, size_M))

    y_RD = outputs(rows, start_M, size_M)
    if not plan.is_spread:
        return y_RD
    members, room = plan.split, rows.shape[0]
    start_NM, size_NM = (members.gather(table[None], 0) for table in (start_M, size_M))
    sum_RD = y_RD.astype(jnp.float32)
    for hop in range(1, members.size):
        there, back, source = rotation(members, hop, start_NM, size_NM)
        x_RD: Any = exchange(members, plan.native, room, rows, there, back)
        y_RD = outputs(x_RD, start_NM[source], size_NM[source])
        theirs: Any = exchange(members, plan.native, room, y_RD, back, there)
        sum_RD += theirs.astype(jnp.float32)
    return sum_RD.astype(rows.dtype)


def _itinerary(plan: DispatchSpec, count_E: Array) -> tuple[ExchangeSizes, ExchangeSizes, Array, Array]:
    """Runs to the experts and back, and where each local expert's rows begin (multiples of the block) and how many.

    A device's rows are sorted by expert; those of an expert lie sorted by the device they came from.
    """
    devices, me = plan.devices, plan.devices.index()
    count_NE = devices.gather(count_E[None], 0)
    local = plan.experts // devices.size
    own = lambda table, dim: lax.dynamic_slice_in_dim(table, me * local, local, dim)  # noqa: E731
    size_E = count_NE.sum(0)
    start_E = _starts(_whole_blocks(size_E, plan.block).reshape(devices.size, local)).reshape(-1)
    begin_NE = _starts(count_NE)
    land_NE = start_E + _starts(count_NE.T).T  # after the rows of earlier devices
    begin_E, land_E = (lax.dynamic_index_in_dim(table, me, 0, keepdims=False) for table in (begin_NE, land_NE))
    arrive = own(count_NE, 1).reshape(-1)
    there = ExchangeSizes(begin_E, count_E, land_E, arrive)
    back = ExchangeSizes(own(land_NE, 1).reshape(-1), arrive, own(begin_NE, 1).reshape(-1), count_E)
    return there, back, own(start_E, 0), own(size_E, 0)


def _starts(size: Array) -> Array:
    """Returns the starts of consecutive runs of these sizes along the last dim."""
    return jnp.cumsum(size, -1, dtype=jnp.int32) - size


def _whole_blocks(size: Array, block: int) -> Array:
    return -(-size // block) * block


def _row(start_E: Array, expert_A: Array, rank_A: Array) -> Array:
    """Row of every choice, -1 for those that go nowhere."""
    return jnp.where(expert_A < start_E.size, start_E.at[expert_A].get(mode="clip") + rank_A, -1)


def _room(rows: int, groups: int, block: int) -> int:
    """Rows that hold so many in so many groups of whole blocks, however they are shared out."""
    return -(-rows // block) * block + groups * block
