"""Which layers each stage of a pipeline holds, and parameters on their way there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxtrain.mesh.rules import LAYERS, STAGES
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.models.define import Definition, Tree
from jaxtrain.pipeline.table import Table


@dataclass(frozen=True, eq=False)
class Stages:
    """The layers of every stage.

    numbers: int32 [stages, chunks, layers], the layer at each place.
    """

    numbers: np.ndarray
    definition: Definition
    sharder: Sharder

    @staticmethod
    def of(table: Table, definition: Definition, sharder: Sharder) -> Stages:
        """Layers in equal parts, in the order of the virtual stages."""
        stacked = {n[0]: p.shape[0] for n, p in zip(*map(_leaves, (definition.names, definition.params))) if n}
        layers = stacked[LAYERS]
        each = layers // table.virtual.size
        return Stages(each * table.virtual[..., None] + np.arange(each, dtype=np.int32), definition, sharder)

    @property
    def is_natural(self) -> bool:
        """Whether stages hold the layers in their order, so that these need not move."""
        return bool((np.diff(self.numbers.reshape(-1)) == 1).all())

    def parted(self, tree: Tree) -> tuple[dict[int, Any], dict[int, Any]]:
        """Leaves of a tree like the parameters, by number: those with a dim of layers first, and the others."""
        leaves = list(enumerate(_leaves(tree)))
        names = _leaves(self.definition.names)
        is_layer = [bool(n) and n[0] == LAYERS for n in names]
        return {i: x for i, x in leaves if is_layer[i]}, {i: x for i, x in leaves if not is_layer[i]}

    def joined(self, layers: dict[int, Any], edges: dict[int, Any]) -> Tree:
        """The tree of both; shapes alone where a dict is empty."""
        both = layers | edges
        leaves = [both.get(i, p) for i, p in enumerate(_leaves(self.definition.params))]
        return jax.tree.unflatten(jax.tree.structure(self.definition.params), leaves)

    def view(self, layers: dict[int, Array]) -> dict[int, Array]:
        """[layers, ...] in their order -> in the order of the stages, each stage's own on its devices."""
        return {i: self.sharder.lead(self._taken(x, self.numbers.reshape(-1)), ((STAGES,),)) for i, x in layers.items()}

    def natural(self, tree: Any) -> Any:
        """The way back."""
        back = np.argsort(self.numbers.reshape(-1))
        return jax.tree.map(lambda x: self._taken(x, back), tree)

    def _taken(self, x: Array, order: np.ndarray) -> Array:
        return x if self.is_natural else jnp.take(x, order, axis=0)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple))
