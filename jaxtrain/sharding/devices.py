"""Device meshes: the order of devices along the axes of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxtrain.errors import UserError
from jaxtrain.sharding.axes import AXES
from jaxtrain.sharding.layout import Layout


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh of a layout, with the inner axes on the fastest network.

    Axes in `dcn` span slices (TPU) or processes (elsewhere) by that factor; the rest of them stays inside one. All axes
    are Auto: Explicit axes cannot slice a sharded stage dim, which pipelines need.

    Raises:
        UserError: the sizes do not multiply to the number of devices, or `dcn` does not divide its axis.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [layout.sizes[axis] for axis in AXES]
    outer = [layout.dcn.get(axis, 1) for axis in AXES]
    for axis, size, across in zip(AXES, shape, outer):
        if size % across:
            raise UserError(f"mesh.dcn.{axis}: {across} does not divide mesh.{axis} = {size}")
    if int(np.prod(shape)) != len(devices):
        raise UserError(f"layout {layout} does not fit {len(devices)} devices")
    if any(n > 1 for n in outer):
        grid = _hybrid([s // o for s, o in zip(shape, outer)], outer, devices)
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _hybrid(inner: list[int], outer: list[int], devices: list[Any]) -> np.ndarray:
    """Returns the devices as a grid whose outer factor spans slices.

    Without slices it spans processes; under simulation, equal runs of devices.
    """
    granules = {getattr(d, "slice_index", d.process_index) for d in devices}
    if len(granules) == int(np.prod(outer)):
        by_process = not hasattr(devices[0], "slice_index")
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, process_is_granule=by_process, allow_split_physical_axes=True
        )
    grid = np.asarray(devices).reshape(outer + inner)
    order = [axis for pair in zip(range(len(outer)), range(len(outer), 2 * len(outer))) for axis in pair]
    return grid.transpose(order).reshape([o * i for o, i in zip(outer, inner)])
