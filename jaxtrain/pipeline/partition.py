"""Partition of layers over pipeline stages, and the transfer of parameters there and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError, join_words
from jaxtrain.models.model_def import ModelDef, Tree
from jaxtrain.nn.stack import Layers
from jaxtrain.pipeline.check import misfit
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.sharding.rules import LAYERS, PIPELINE_AXIS
from jaxtrain.sharding.sharder import Dims, Sharder


@dataclass(frozen=True, eq=False)
class Stages:
    """The layers of every stage: parts as equal as can be, in the order of the virtual stages, the larger ones first.

    The train state holds layers in their order, the first stage the first of them; layers that the stages do not divide
    lie whole in each stage's share of another dim (`mesh.rules.compute_dims`). So a stage works on others than it holds
    under a schedule of several chunks, and where parts are not equal: these are sent there at the beginning of a step,
    gradients back at its end. All parts take the room of the largest; what is left over is no layer.

    Args:
        group: layers that only go together.

    Raises:
        UserError: the layers cannot be shared out.
    """

    table: Table
    model_def: ModelDef
    sharder: Sharder
    group: int = 1

    def __post_init__(self) -> None:
        counts = {p.shape[0] for n, p in zip(self._names(), _leaves(self.model_def.params)) if n and n[0] == LAYERS}
        if len(counts) != 1:
            found = (
                f"stacks of {join_words(sorted(counts), 'and')} layers"
                if counts
                else "no parameters with a dim `layers`"
            )
            raise UserError(
                f"mesh.{PIPELINE_AXIS}: stages share out layers, and the model has {found}; expected one number"
            )
        if problem := misfit(next(iter(counts)), self.group, self.table):
            raise UserError(f"mesh.{PIPELINE_AXIS}: {problem}")

    @cached_property
    def parts(self) -> np.ndarray:
        """int [virtual stages + 1]: the first layer of each, and the number of layers."""
        groups = self._layers // self.group
        each, more = divmod(groups, self.table.virtual.size)
        sizes = each + (np.arange(self.table.virtual.size) < more)
        return np.concatenate([[0], np.cumsum(sizes)]) * self.group

    @property
    def room(self) -> int:
        """Layers of the largest part."""
        return int(np.diff(self.parts).max())

    @property
    def is_even(self) -> bool:
        """True if all parts are equal."""
        return self.filled == 1

    @property
    def filled(self) -> float:
        """Share of all rooms that layers take; the rest of a stage's work is for nothing."""
        return self._layers / (self.room * self.table.virtual.size)

    @property
    def layers(self) -> Layers:
        """Layers of all stages: number int32 [stages, chunks, room], present likewise or None."""
        at = np.arange(self.room, dtype=np.int32)
        begin, end = (edge[self.table.virtual][..., None] for edge in (self.parts[:-1], self.parts[1:]))
        present = begin + at < end
        return Layers(np.where(present, begin + at, 0).astype(np.int32), None if self.is_even else present)

    def split_layers(self, tree: Tree) -> tuple[dict[int, Any], dict[int, Any]]:
        """Leaves of a tree like the parameters, by number: those with a dim of layers first, and the others."""
        is_layer = [bool(names) and names[0] == LAYERS for names in self._names()]
        leaves = list(enumerate(_leaves(tree)))
        return {i: x for i, x in leaves if is_layer[i]}, {i: x for i, x in leaves if not is_layer[i]}

    def merge_layers(self, layers: dict[int, Any], edges: dict[int, Any]) -> Tree:
        """The tree of both; shapes alone where a dict is empty."""
        both = layers | edges
        leaves = [both.get(i, p) for i, p in enumerate(_leaves(self.model_def.params))]
        return jax.tree.unflatten(jax.tree.structure(self.model_def.params), leaves)

    def weights(self, layers: dict[int, Array]) -> dict[int, Array]:
        """Parameters [layers, ...] in their order -> [stages * chunks * room, ...], each stage's own on its devices.

        What has to move does so in the dtype that it may travel in.
        """
        if self.is_even and self.table.chunks == 1:
            return {i: self._lead(x) for i, x in layers.items()}
        travels = _leaves(self.model_def.gather_dtypes)
        return {i: self._sent(x.astype(travels[i]), i) for i, x in layers.items()}

    def zeros(self, layers: dict[int, Array]) -> dict[int, Array]:
        """Float32 zeros like `weights`, where gradients are added up."""
        names = self._names()

        def zero(x: Array, leaf: int) -> Array:
            room = jnp.zeros((self.room * self.table.virtual.size, *x.shape[1:]), jnp.float32)
            return self.sharder.constrain_dims(room, self._at_stages(self.sharder.storage_dims(names[leaf], x.shape)))

        return {i: zero(x, i) for i, x in layers.items()}

    def natural(self, layers: dict[int, Array]) -> dict[int, Array]:
        """Gradients in the order of the layers, where the train state has them."""
        return {i: self._back(x, i) for i, x in layers.items()}

    def ordered(self, tree: Any) -> Any:
        """Arrays [stages * chunks * room, ...] that are small, in the order of the layers."""
        if self.is_even:
            return jax.tree.map(lambda x: self._moved(x, True), tree)
        return jax.tree.map(lambda x: self._cut(self.sharder.constrain_leading(x, ((),))), tree)

    def _sent(self, x: Array, leaf: int) -> Array:
        if self.is_even:
            return self._moved(self._lead(x), False)
        blocks = []
        for virtual in self.table.virtual.reshape(-1):
            begin, end = self.parts[virtual : virtual + 2]
            blocks += [x[begin:end], *[x[end - 1 : end]] * (self.room - (end - begin))]  # any weights do for no layer
        dims = self.sharder.compute_dims(self._names()[leaf], x.shape)
        return self.sharder.constrain_dims(jnp.concatenate(blocks), self._at_stages(dims))

    def _back(self, x: Array, leaf: int) -> Array:
        if self.is_even:
            return self._moved(x, True)
        shape = (self._layers, *x.shape[1:])
        dims = self.sharder.storage_dims(self._names()[leaf], shape)
        return self._cut(self.sharder.constrain_dims(self.sharder.constrain_dims(x, self._at_stages(dims)), dims))

    def _cut(self, x: Array) -> Array:
        """Layers in their order, without the room that is left over."""
        places = np.argsort(self.table.virtual.reshape(-1)) * self.room
        return jnp.concatenate([x[at : at + count] for at, count in zip(places, np.diff(self.parts))])

    @staticmethod
    def _at_stages(dims: Dims) -> Dims:
        """The layers' dim over the stages in place of another one."""
        return ((PIPELINE_AXIS,), *(tuple(axis for axis in dim if axis != PIPELINE_AXIS) for dim in dims[1:]))

    def _lead(self, x: Array) -> Array:
        return self.sharder.constrain_leading(x, ((PIPELINE_AXIS,),))

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
                        out[end] = out[end] + lax.ppermute(blocks[begin], PIPELINE_AXIS, pairs)
            return jnp.concatenate(out)

        return self.sharder.shard_map(move, P(PIPELINE_AXIS), P(PIPELINE_AXIS), axes=(PIPELINE_AXIS,))(x)

    @cached_property
    def _layers(self) -> int:
        names, params = self._names(), _leaves(self.model_def.params)
        return next(p.shape[0] for n, p in zip(names, params) if n and n[0] == LAYERS)

    def _names(self) -> list[Any]:
        return _leaves(self.model_def.names)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple))
