"""A layout: the mesh and the rules as one named value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.config.schema import MeshConfig
from jaxtrain.sharding.axes import AXES, infer_sizes, shape_text
from jaxtrain.sharding.rules import Rules


@dataclass(frozen=True)
class Layout:
    """Sizes of all mesh axes, the part of each that spans slices (`dcn`), and the rules."""

    name: str
    sizes: dict[str, int]
    rules: Rules
    dcn: dict[str, int]

    def __str__(self) -> str:
        return f"{self.name}: {shape_text(self.sizes)}"


def resolve_layout(name: str, mesh: MeshConfig, rules: Mapping[str, tuple[str, ...]], devices: int) -> Layout:
    """Returns the layout on `devices` devices, with -1 filled in. Raises UserError if it does not fit."""
    sizes = infer_sizes({axis: getattr(mesh, axis) for axis in AXES}, devices)
    return Layout(name, sizes, dict(rules), dict(mesh.dcn))
