"""A layout: the mesh and the rules as one named value."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.config.schema import Config
from jaxtrain.sharding.axes import AXES, fill, shape_text
from jaxtrain.sharding.rules import Rules


@dataclass(frozen=True)
class Layout:
    """Resolved sizes of all mesh axes, the part of each that spans slices (`dcn`), and the rules."""

    name: str
    sizes: dict[str, int]
    rules: Rules
    dcn: dict[str, int]

    def __str__(self) -> str:
        return f"{self.name}: {shape_text(self.sizes)}"


def resolve(config: Config, devices: int) -> Layout:
    """The config's layout on `devices` devices; a -1 is filled. Raises ValueError where it does not fit."""
    sizes = fill({axis: getattr(config.mesh, axis) for axis in AXES}, devices)
    return Layout(config.layout, sizes, dict(config.rules), dict(config.mesh.dcn))
