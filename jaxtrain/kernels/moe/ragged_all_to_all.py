"""Exchange of runs of rows between devices, of sizes known only at run time: a ragged all-to-all and its transpose."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.moe.device_group import DeviceGroup
from jaxtrain.kernels.moe.token_gather import rows_at


class ExchangeSizes(NamedTuple):
    """Runs that one device sends and receives, as in `lax.ragged_all_to_all`.

    All int32, one entry per (device, expert on that device), device by device.

    Attributes:
        input_offset: start of each run in the sender's rows.
        send_size: rows of each run.
        output_offset: start of each run in the receiver's rows.
        recv_size: rows of each run that is received.
    """

    input_offset: Array
    send_size: Array
    output_offset: Array
    recv_size: Array


def rotation_sizes(
    devices: DeviceGroup, hop: int, start_NM: Array, size_NM: Array
) -> tuple[ExchangeSizes, ExchangeSizes, Any]:
    """Returns the exchange in which every device sends all its runs to the one `hop` later, to the same rows.

    Args:
        devices: the devices.
        hop: distance of sender and receiver.
        start_NM: int32, start of every device's runs, of which each has the same number.
        size_NM: int32, rows of these.

    Returns:
        Sizes of the exchange and of its inverse, and the index of the device that this one receives from.
    """
    N, me = devices.size, devices.index()
    to, source = (me + hop) % N, (me - hop) % N

    def entries(table_NM: Array, of: Any, at: Any) -> Array:
        """Returns the runs of device `of` in the entries for device `at`, zeros elsewhere."""
        return jnp.where(jnp.arange(N)[:, None] == at, table_NM[of], 0).reshape(-1)

    sent, received = entries(size_NM, me, to), entries(size_NM, source, source)
    sent_from, received_at = entries(start_NM, me, to), entries(start_NM, source, source)
    forward = ExchangeSizes(sent_from, sent, sent_from, received)
    return forward, ExchangeSizes(received_at, received, received_at, sent), source


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange(
    devices: DeviceGroup, native: bool, rows: int, x_RD: Array, forward: ExchangeSizes, inverse: ExchangeSizes
) -> Array:
    """Exchanges rows. Returns [rows, D]: the received rows, zeros elsewhere.

    The derivative is custom, because that of the primitive was wrong for its `output` if a device receives nothing.

    Args:
        devices: the devices of the exchange.
        native: use the primitive, which XLA supports on GPU and TPU only; else gather all rows and select.
        rows: size of the result; the received runs must fit.
        x_RD: rows of this device.
        forward: sizes of the exchange.
        inverse: sizes of the exchange that sends the same runs back: the transpose.
    """
    del inverse
    if not native:
        return _gather_and_select(devices, rows, x_RD, forward)
    # Without the barrier XLA allocates the zeros of all exchanges of a layer at its start.
    x_RD, output = lax.optimization_barrier((x_RD, jnp.zeros((rows, x_RD.shape[-1]), x_RD.dtype)))
    axis: Any = devices.axes if len(devices.axes) > 1 else "".join(devices.axes)
    return lax.ragged_all_to_all(x_RD, output, *forward, axis_name=axis)


def _exchange_fwd(devices, native, rows, x_RD, forward, inverse):
    like_R0 = jnp.zeros((x_RD.shape[0], 0), x_RD.dtype)
    return exchange(devices, native, rows, x_RD, forward, inverse), (like_R0, forward, inverse)


def _exchange_bwd(devices, native, rows, residuals, g_RD):
    like_R0, forward, inverse = residuals
    return exchange(devices, native, like_R0.shape[0], g_RD, inverse, forward), None, None


exchange.defvjp(_exchange_fwd, _exchange_bwd)


def _gather_and_select(devices: DeviceGroup, rows: int, x_RD: Array, forward: ExchangeSizes) -> Array:
    """Exchanges rows by an all-gather; every row selects the run that covers it."""
    runs = forward.send_size.shape[0] // devices.size

    def for_this_device(table: Array) -> Array:
        """Returns the entries of every sender's table for this device."""
        all_NM = devices.gather(table[None], 0)
        return lax.dynamic_slice_in_dim(all_NM, devices.index() * runs, runs, 1)

    start_NM, size_NM, output_NM = map(for_this_device, forward[:3])
    first_NM = start_NM + x_RD.shape[0] * jnp.arange(devices.size)[:, None]
    offset_RNM = jnp.arange(rows)[:, None, None] - output_NM
    covers_RNM = (offset_RNM >= 0) & (offset_RNM < size_NM)
    source_R = jnp.sum(jnp.where(covers_RNM, first_NM + offset_RNM, 0), (1, 2))
    out_of_range = devices.size * x_RD.shape[0]
    return rows_at(devices.gather(x_RD, 0), jnp.where(covers_RNM.any((1, 2)), source_R, out_of_range))
