"""The mesh axes, slowest network first."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from jaxtrain.errors import UserError

AXES = ("replica", "pipeline", "data", "fsdp", "expert", "context", "model")


def infer_sizes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Returns the sizes of all axes, with -1 inferred from the number of devices.

    Raises:
        UserError: two -1, a size of 0, or a product that is not `devices`.
    """
    full = {axis: sizes.get(axis, 1) for axis in AXES}
    free = [axis for axis, size in full.items() if size == -1]
    fixed = prod(size for size in full.values() if size != -1)
    if any(size == 0 or size < -1 for size in full.values()):
        raise UserError(f"mesh {shape_text(full)}: expected positive sizes, or -1 to infer one")
    if len(free) > 1:
        raise UserError(f"mesh {shape_text(full)}: only one axis may be -1; found {' and '.join(free)}")
    if free:
        if devices % fixed:
            raise UserError(f"mesh {shape_text(full)}: needs a multiple of {fixed} devices, not {devices}")
        full[free[0]] = devices // fixed
    elif fixed != devices:
        raise UserError(f"mesh {shape_text(full)} has {fixed} places for {devices} devices; set one axis to -1")
    return full


def shape_text(sizes: Mapping[str, int]) -> str:
    """Formats the axes larger than one, as in `data 2 x fsdp 2 x model 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "of 1 device"
