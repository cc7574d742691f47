"""Fits the mesh of a config to a number of devices, before JAX starts.

1. Sizes from the command line are fixed.
2. Other sizes of axes that the layout does not use become 1.
3. If the command line changes `simulate`, `layout` or the mesh, or if 2 applies, each other size becomes its largest
   divisor that fits the devices, innermost axis first.
4. A size of -1 becomes the largest divisor of the remaining devices that the model and the batch can be split into.
5. `data` takes the devices that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod

from jaxtrain.config.schema import Config
from jaxtrain.errors import Problem
from jaxtrain.sharding.axes import AXES, shape_text
from jaxtrain.sharding.rules import CONTEXT, DATA_AXIS, axes_of, with_implied_rules

INNERMOST_FIRST = ("model", "context", "expert", "pipeline", "fsdp", "data", "replica")
Check = Callable[[Config], Collection[Problem]]
Sizes = Mapping[str, int]


def mesh_sizes(config: Config) -> dict[str, int]:
    """Returns the sizes of all mesh axes; one may be -1."""
    return {axis: getattr(config.mesh, axis) for axis in AXES}


def unused_axes(config: Config, fixed: Collection[str]) -> dict[str, int]:
    """Returns the axes, not in `fixed`, of more than one device that no rule uses, with their sizes."""
    used = {axis for axes in with_implied_rules(config.axis_rules, config.zero).values() for axis in axes}
    return {axis: size for axis, size in mesh_sizes(config).items() if size != 1 and axis not in {*used, *fixed}}


def fit_mesh(config: Config, devices: int, fixed: Collection[str], may_shrink: bool, check: Check) -> Config:
    """Returns the config with a mesh of `devices` devices, or unchanged if no mesh fits.

    Args:
        config: one of its mesh sizes may be -1.
        devices: number of devices.
        fixed: axes whose sizes must not change.
        may_shrink: whether sizes other than -1 may become smaller.
        check: returns the problems of a config on these devices.
    """
    sizes = mesh_sizes(config)
    if config.mesh.dcn:
        return config
    if may_shrink and not _fits(sizes, devices):
        sizes = _shrink(sizes, devices, fixed)
    if not _fits(sizes, devices):
        return config
    inferred = next((axis for axis in AXES if sizes[axis] == -1), None)
    fitted = with_sizes(config, sizes)
    if inferred in (None, DATA_AXIS) or not check(fitted):
        return fitted
    if sizes[DATA_AXIS] != 1 and DATA_AXIS in fixed:
        return config
    rest = devices // prod(size for size in sizes.values() if size != -1)
    for size in reversed(range(1, rest)):
        if rest % size == 0:
            split = with_sizes(config, {**sizes, inferred: size, DATA_AXIS: sizes[DATA_AXIS] * (rest // size)})
            if not check(split):
                return split
    return config


def _fits(sizes: Sizes, devices: int) -> bool:
    product = prod(size for size in sizes.values() if size != -1)
    return devices % product == 0 if -1 in sizes.values() else devices == product


def _shrink(sizes: Sizes, devices: int, fixed: Collection[str]) -> dict[str, int]:
    """Returns divisors of the sizes that divide the devices, and `data` times the remaining devices."""
    rest, result = devices, dict(sizes)
    for axis in fixed:
        if sizes[axis] > 0 and rest % sizes[axis] == 0:
            rest //= sizes[axis]
    for axis in INNERMOST_FIRST:
        if axis not in fixed and sizes[axis] != -1:
            result[axis] = max(n for n in range(1, sizes[axis] + 1) if sizes[axis] % n == 0 and rest % n == 0)
            rest //= result[axis]
    if -1 not in sizes.values() and DATA_AXIS not in fixed:
        result[DATA_AXIS] *= rest
    return result


def with_sizes(config: Config, sizes: Sizes) -> Config:
    """Returns the config with other mesh sizes, and `context_parallel: auto` if these no longer shard sequences."""
    mesh = config.mesh.model_copy(update=dict(sizes))
    if mesh == config.mesh:
        return config
    result = config.model_copy(update={"mesh": mesh})
    axes = axes_of(CONTEXT, config.axis_rules)
    is_sharded, was_sharded = (any(mesh_sizes(c)[axis] != 1 for axis in axes if axis in AXES) for c in (result, config))
    return result if is_sharded or not was_sharded else result.model_copy(update={"context_parallel": "auto"})


def describe_change(old: Config, new: Config, devices: int) -> str:
    """Returns `mesh: data 2 x fsdp 2 x model 2 becomes fsdp 2 x model 2 on 4 devices`."""
    sizes = mesh_sizes(new)
    rest = devices // prod(size for size in sizes.values() if size != -1)
    shape = shape_text({axis: rest if size == -1 else size for axis, size in sizes.items()})
    return f"mesh: {shape_text(mesh_sizes(old))} becomes " + (
        f"{shape} on {devices} devices" if devices > 1 else "1 device"
    )
