"""Fits the mesh sizes of a config to a number of devices, before JAX starts.

Sizes from the command line are fixed. Sizes from files and layouts fit as follows:

- a size of -1 takes as many of the remaining devices as the model and the batch can be split over; `data` takes what
  is left;
- when `simulate` or `layout` comes from the command line, and the sizes of files or of the layout do not fit the
  devices, every axis keeps the largest divisor of its size that does, innermost axes first; `data` takes what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod

from jaxtrain.config.schema import Config
from jaxtrain.errors import Problem
from jaxtrain.sharding.axes import AXES

# Innermost axes first: those whose size a layout is chosen for.
ORDER = ("model", "context", "expert", "pipeline", "fsdp", "data", "replica")
SPARE = "data"  # takes the devices that no other axis can use
Check = Callable[[Config], Collection[Problem]]


def fit_mesh(config: Config, devices: int, fixed: Collection[str], may_shrink: bool, check: Check) -> Config:
    """Returns the config with mesh sizes that fit `devices`, or as it is if nothing fits.

    Args:
        config: with sizes that may be -1 for one axis.
        devices: number of devices.
        fixed: axes whose sizes do not change.
        may_shrink: sizes of other axes may become smaller, too; else only -1 is filled.
        check: problems of a config on these devices.
    """
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    if config.mesh.dcn:
        return config
    if may_shrink and not _fits(sizes, devices):
        sizes = _shrunk(sizes, devices, fixed)
    if not _fits(sizes, devices):
        return config
    open_axis = next((axis for axis in AXES if sizes[axis] == -1), None)
    changed = _with(config, sizes)
    if open_axis is None or open_axis == SPARE or not check(changed):
        return config if changed.mesh == config.mesh else changed
    if sizes[SPARE] != 1 and SPARE in fixed:
        return config
    rest = devices // prod(size for size in sizes.values() if size != -1)
    for size in sorted((size for size in range(1, rest) if rest % size == 0), reverse=True):
        split = _with(config, {**sizes, open_axis: size, SPARE: sizes[SPARE] * (rest // size)})
        if not check(split):
            return split
    return config


def _fits(sizes: Mapping[str, int], devices: int) -> bool:
    known = prod(size for size in sizes.values() if size != -1)
    return devices % known == 0 if -1 in sizes.values() else devices == known


def _shrunk(sizes: Mapping[str, int], devices: int, fixed: Collection[str]) -> dict[str, int]:
    """Divisors of the sizes that divide the devices, and the spare devices on `data`."""
    rest = devices
    for axis in fixed:
        rest //= max(1, sizes[axis]) if rest % max(1, sizes[axis]) == 0 else 1
    out = dict(sizes)
    for axis in ORDER:
        if axis not in fixed and sizes[axis] != -1:
            out[axis] = max(size for size in range(1, sizes[axis] + 1) if sizes[axis] % size == 0 and rest % size == 0)
            rest //= out[axis]
    if -1 not in sizes.values() and SPARE not in fixed:
        out[SPARE] *= rest
    return out


def _with(config: Config, sizes: Mapping[str, int]) -> Config:
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=dict(sizes))})


def changes(old: Config, new: Config) -> str:
    """Returns `data 2 x fsdp 2 x model 2 becomes fsdp 2 x model 2`."""
    return f"{_text(old)} becomes {_text(new)}"


def _text(config: Config) -> str:
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "1 device"
