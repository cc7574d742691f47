"""Which layers each stage of a pipeline holds, and parameters on their way there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh.rules import LAYERS, STAGES
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.models.define import Definition, Tree
from jaxtrain.pipeline.table import Table


@dataclass(frozen=True, eq=False)
class Stages:
    """The layers of every stage: equal parts, in the order of the virtual stages.

    The train state holds layers in their order, the first stage the first of them. Under a schedule of several chunks
    a stage works on others than these, and they are sent there at the beginning of a step, gradients back at its end.
    """

    table: Table
    definition: Definition
    sharder: Sharder

    @property
    def numbers(self) -> np.ndarray:
        """int32 [stages, chunks, layers], the layer at each place."""
        stacked = {n[0]: p.shape[0] for n, p in zip(self._names(), _leaves(self.definition.params)) if n}
        each = stacked[LAYERS] // self.table.virtual.size
        return each * self.table.virtual[..., None] + np.arange(each, dtype=np.int32)

    def parted(self, tree: Tree) -> tuple[dict[int, Any], dict[int, Any]]:
        """Leaves of a tree like the parameters, by number: those with a dim of layers first, and the others."""
        is_layer = [bool(names) and names[0] == LAYERS for names in self._names()]
        leaves = list(enumerate(_leaves(tree)))
        return {i: x for i, x in leaves if is_layer[i]}, {i: x for i, x in leaves if not is_layer[i]}

    def joined(self, layers: dict[int, Any], edges: dict[int, Any]) -> Tree:
        """The tree of both; shapes alone where a dict is empty."""
        both = layers | edges
        leaves = [both.get(i, p) for i, p in enumerate(_leaves(self.definition.params))]
        return jax.tree.unflatten(jax.tree.structure(self.definition.params), leaves)

    def view(self, layers: dict[int, Array]) -> dict[int, Array]:
        """[layers, ...] in their order -> in that of the stages, each stage's own on its devices."""
        return {i: self._moved(self.sharder.lead(x, ((STAGES,),)), False) for i, x in layers.items()}

    def natural(self, tree: Any) -> Any:
        """The way back."""
        return jax.tree.map(lambda x: self._moved(x, True), tree)

    def _moved(self, x: Array, back: bool) -> Array:
        """Sends every virtual stage's layers from where they lie in their order to their stage and chunk, or back.

        By permutations: a gather along the sharded dim would bring all layers to every device.
        """
        chunks, parts = self.table.chunks, range(self.table.virtual.size)
        if chunks == 1:
            return x
        ways = [(divmod(part, chunks), tuple(self.table.home[part].tolist())) for part in parts]
        ways = [(there, here) if back else (here, there) for here, there in ways]

        def move(x: Array) -> Array:
            blocks = x.reshape(chunks, -1, *x.shape[1:])
            out = [jnp.zeros_like(blocks[0])] * chunks
            for begin in range(chunks):
                for end in range(chunks):
                    pairs = [(here[0], there[0]) for here, there in ways if (here[1], there[1]) == (begin, end)]
                    if pairs:  # who is not in them gets zeros
                        out[end] = out[end] + lax.ppermute(blocks[begin], STAGES, pairs)
            return jnp.concatenate(out)

        return self.sharder.map(move, P(STAGES), P(STAGES), axes=(STAGES,))(x)

    def _names(self) -> list[Any]:
        return _leaves(self.definition.names)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple))
