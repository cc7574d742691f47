"""Runs of rows between devices, of sizes known only when running: a ragged all-to-all and its transpose."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.moe.device_group import Group
from jaxtrain.kernels.moe.token_gather import rows_at


class ExchangeSizes(NamedTuple):
    """Rows that one device sends and receives; int32, one entry per (device, expert of its), device by device.

    begin, size: of each run in the sender's rows. land: where the run begins in its receiver's rows.
    arrive: sizes of what comes in from each device.
    """

    begin: Array
    size: Array
    land: Array
    arrive: Array


def rotation(devices: Group, hop: int, begin_NM: Array, size_NM: Array) -> tuple[ExchangeSizes, ExchangeSizes, Any]:
    """Every device hands all its runs to the one `hop` places on, where they land as they lie.

    Args:
        begin_NM, size_NM: int32, every device's runs, of the same number each.

    Returns:
        Runs there and back, and the place of the device that this one receives from.
    """
    N, me = devices.size, devices.index()
    to, source = (me + hop) % N, (me - hop) % N

    def entries(table_NM: Array, of: Any, at: Any) -> Array:
        """Device `of`'s runs in the entries for device `at`, zeros elsewhere."""
        return jnp.where(jnp.arange(N)[:, None] == at, table_NM[of], 0).reshape(-1)

    out, into = entries(size_NM, me, to), entries(size_NM, source, source)
    begin, land = entries(begin_NM, me, to), entries(begin_NM, source, source)
    return ExchangeSizes(begin, out, begin, into), ExchangeSizes(land, into, land, out), source


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange(devices: Group, native: bool, rows: int, x_RD: Array, there: ExchangeSizes, back: ExchangeSizes) -> Array:
    """[rows, D]: what arrives by `there`, zeros elsewhere. `back` moves the same runs the other way: the transpose.

    The gradient is written out because the primitive's own was wrong for its `output` where a device receives
    nothing.

    Args:
        devices: who takes part.
        native: use the primitive, which XLA has on GPU and TPU only; else gather all rows and pick.
        rows: to receive into; runs must fit.
    """
    del back
    if not native:
        return _picked(devices, rows, x_RD, there)
    # The barrier: XLA would make the zeros of all exchanges of a layer at once, at its begin.
    x_RD, output = lax.optimization_barrier((x_RD, jnp.zeros((rows, x_RD.shape[-1]), x_RD.dtype)))
    axis: Any = devices.axes if len(devices.axes) > 1 else "".join(devices.axes)
    return lax.ragged_all_to_all(x_RD, output, there.begin, there.size, there.land, there.arrive, axis_name=axis)


def _exchange_fwd(devices, native, rows, x_RD, there, back):
    like_R0 = jnp.zeros((x_RD.shape[0], 0), x_RD.dtype)
    return exchange(devices, native, rows, x_RD, there, back), (like_R0, there, back)


def _exchange_bwd(devices, native, rows, residuals, g_RD):
    like_R0, there, back = residuals
    return exchange(devices, native, like_R0.shape[0], g_RD, back, there), None, None


exchange.defvjp(_exchange_fwd, _exchange_bwd)


def _picked(devices: Group, rows: int, x_RD: Array, there: ExchangeSizes) -> Array:
    """The same by an all-gather: every row looks for the run that covers it."""
    each = there.size.shape[0] // devices.size

    def mine(table: Array) -> Array:
        """Entries of every sender's table that concern this device."""
        all_NM = devices.gather(table[None], 0)
        return lax.dynamic_slice_in_dim(all_NM, devices.index() * each, each, 1)

    begin_NM, size_NM, land_NM = mine(there.begin), mine(there.size), mine(there.land)
    first_NM = begin_NM + x_RD.shape[0] * jnp.arange(devices.size)[:, None]
    offset_RNM = jnp.arange(rows)[:, None, None] - land_NM
    covers_RNM = (offset_RNM >= 0) & (offset_RNM < size_NM)
    source_R = jnp.sum(jnp.where(covers_RNM, first_NM + offset_RNM, 0), (1, 2))
    nowhere = devices.size * x_RD.shape[0]
    return rows_at(devices.gather(x_RD, 0), jnp.where(covers_RNM.any((1, 2)), source_R, nowhere))
