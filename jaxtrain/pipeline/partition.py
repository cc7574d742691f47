"""Partition of layers over pipeline stages, and the transfer of weights to the stages and of gradients back."""

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
from jaxtrain.pipeline.check import partition_problem
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.sharding.rules import LAYERS, PIPELINE_AXIS
from jaxtrain.sharding.sharder import Dims, Sharder

Leaves = dict[int, Any]  # leaves of a tree like the parameters, by their index


@dataclass(frozen=True, eq=False)
class LayerPartition:
    """Partition of the layers over the virtual stages: in order, as even as possible, the larger virtual stages first.

    The train state holds the layers in order, the first ones on the first stage. If their number is not divisible by
    the number of stages, it shards another dim over the stages instead (`sharding.rules.compute_dims`). With several
    chunks, or an uneven partition, a stage thus computes other layers than it stores: weights are sent at the start of
    a step, and gradients back at its end. Every virtual stage has as many slots as the largest has layers; the slots
    that are left are padding.

    Attributes:
        group: layers per group; stages hold whole groups.

    Raises:
        UserError: the layers can not be partitioned.
    """

    table: Table
    model_def: ModelDef
    sharder: Sharder
    group: int = 1

    def __post_init__(self) -> None:
        counts = {p.shape[0] for p in self.split_layers(self.model_def.params)[0].values()}
        if len(counts) != 1:
            stacks = f"stacks of {join_words(sorted(counts), 'and')} layers" if counts else "no dim `layers`"
            message = f"stages hold stacked layers, and the model's parameters have {stacks}; expected one stack"
            raise UserError(f"mesh.{PIPELINE_AXIS}: {message}")
        if problem := partition_problem(self._layers, self.group, self.table):
            raise UserError(f"mesh.{PIPELINE_AXIS}: {problem}")

    @cached_property
    def boundaries(self) -> np.ndarray:
        """First layer of each virtual stage, and the number of layers: int [virtual stages + 1]."""
        each, more = divmod(self._layers // self.group, self.table.virtual_stage.size)
        sizes = each + (np.arange(self.table.virtual_stage.size) < more)
        return np.concatenate([[0], np.cumsum(sizes)]) * self.group

    @property
    def slots(self) -> int:
        """Layer slots of a virtual stage, padding included."""
        return int(np.diff(self.boundaries).max())

    @property
    def is_even(self) -> bool:
        """True if all virtual stages have the same number of layers, so that there is no padding."""
        return self.occupancy == 1

    @property
    def occupancy(self) -> float:
        """Fraction of the slots that hold layers; the work on the others is wasted."""
        return self._layers / (self.slots * self.table.virtual_stage.size)

    @property
    def layers(self) -> Layers:
        """Layers of all stages: number int32 [stages, chunks, slots], present likewise or None."""
        slot = np.arange(self.slots, dtype=np.int32)
        starts, ends = self.boundaries[:-1], self.boundaries[1:]
        start, end = (edges[self.table.virtual_stage][..., None] for edges in (starts, ends))
        present = start + slot < end
        return Layers(np.where(present, start + slot, 0).astype(np.int32), None if self.is_even else present)

    def split_layers(self, tree: Tree) -> tuple[Leaves, Leaves]:
        """Returns the leaves with a dim of layers, and the others (embedding, head)."""
        leaves = list(enumerate(zip(_leaves(tree), self._names())))
        layers = {i: x for i, (x, names) in leaves if names and names[0] == LAYERS}
        return layers, {i: x for i, (x, _) in leaves if i not in layers}

    def merge_layers(self, layers: Leaves, others: Leaves) -> Tree:
        """Returns the tree of both; leaves that are in neither are shapes."""
        both = layers | others
        leaves = [both.get(i, p) for i, p in enumerate(_leaves(self.model_def.params))]
        return jax.tree.unflatten(jax.tree.structure(self.model_def.params), leaves)

    def send_weights(self, layers: Leaves) -> Leaves:
        """Sends parameters [layers, ...] to their stages: [stages * chunks * slots, ...], sharded over the stages.

        Parameters that move are sent in their gather dtype.
        """
        if self.is_even and self.table.chunks == 1:
            return {i: self._constrain_to_stages(x) for i, x in layers.items()}
        dtypes = _leaves(self.model_def.gather_dtypes)
        return {i: self._send(x.astype(dtypes[i]), i) for i, x in layers.items()}

    def zero_gradients(self, layers: Leaves) -> Leaves:
        """Returns float32 zeros with the shape and sharding of `send_weights`, to accumulate gradients in."""
        names = self._names()

        def zeros(x: Array, leaf: int) -> Array:
            zeros = jnp.zeros((self.slots * self.table.virtual_stage.size, *x.shape[1:]), jnp.float32)
            return self.sharder.constrain_dims(zeros, _stage_dims(self.sharder.storage_dims(names[leaf], x.shape)))

        return {i: zeros(x, i) for i, x in layers.items()}

    def return_gradients(self, layers: Leaves) -> Leaves:
        """Sends gradients from their stages to where the train state holds the layers: [layers, ...]."""
        return {i: self._return(x, i) for i, x in layers.items()}

    def in_layer_order(self, tree: Any) -> Any:
        """Returns small arrays [stages * chunks * slots, ...] as [layers, ...]."""
        if self.is_even:
            return jax.tree.map(lambda x: self._permute(x, is_return=True), tree)
        return jax.tree.map(lambda x: self._drop_padding(self.sharder.constrain_leading(x, ((),))), tree)

    def _send(self, x: Array, leaf: int) -> Array:
        if self.is_even:
            return self._permute(self._constrain_to_stages(x), is_return=False)
        blocks = []
        for virtual in self.table.virtual_stage.reshape(-1):
            start, end = self.boundaries[virtual : virtual + 2]
            blocks += [x[start:end], *[x[end - 1 : end]] * (self.slots - (end - start))]  # padding: any weights do
        dims = self.sharder.compute_dims(self._names()[leaf], x.shape)
        return self.sharder.constrain_dims(jnp.concatenate(blocks), _stage_dims(dims))

    def _return(self, x: Array, leaf: int) -> Array:
        if self.is_even:
            return self._permute(x, is_return=True)
        dims = self.sharder.storage_dims(self._names()[leaf], (self._layers, *x.shape[1:]))
        x = self.sharder.constrain_dims(self.sharder.constrain_dims(x, _stage_dims(dims)), dims)
        return self._drop_padding(x)

    def _drop_padding(self, x: Array) -> Array:
        """[stages * chunks * slots, ...] -> [layers, ...]."""
        starts = np.argsort(self.table.virtual_stage.reshape(-1)) * self.slots
        return jnp.concatenate([x[start : start + count] for start, count in zip(starts, np.diff(self.boundaries))])

    def _constrain_to_stages(self, x: Array) -> Array:
        return self.sharder.constrain_leading(x, ((PIPELINE_AXIS,),))

    def _permute(self, x: Array, is_return: bool) -> Array:
        """Sends the layers of every virtual stage from where the train state holds them to their stage, or back.

        By permutations: a gather along the sharded dim would bring all layers to every device.
        """
        chunks = self.table.chunks
        if chunks == 1:
            return x
        # (stage, chunk) of each virtual stage in the train state, and under the schedule.
        routes = [(divmod(i, chunks), tuple(at)) for i, at in enumerate(self.table.location.tolist())]
        routes = [(target, source) if is_return else (source, target) for source, target in routes]

        def permute(x: Array) -> Array:
            blocks = x.reshape(chunks, -1, *x.shape[1:])
            out = [jnp.zeros_like(blocks[0])] * chunks
            for source_chunk in range(chunks):
                for target_chunk in range(chunks):
                    pairs = [(s[0], t[0]) for s, t in routes if (s[1], t[1]) == (source_chunk, target_chunk)]
                    if pairs:  # stages that are no target receive zeros
                        received = lax.ppermute(blocks[source_chunk], PIPELINE_AXIS, pairs)
                        out[target_chunk] = out[target_chunk] + received
            return jnp.concatenate(out)

        return self.sharder.shard_map(permute, P(PIPELINE_AXIS), P(PIPELINE_AXIS), axes=(PIPELINE_AXIS,))(x)

    @cached_property
    def _layers(self) -> int:
        return next(iter(self.split_layers(self.model_def.params)[0].values())).shape[0]

    def _names(self) -> list[Any]:
        return _leaves(self.model_def.names)


def _stage_dims(dims: Dims) -> Dims:
    """Moves the pipeline axis from any other dim to the dim of layers."""
    return ((PIPELINE_AXIS,), *(tuple(axis for axis in dim if axis != PIPELINE_AXIS) for dim in dims[1:]))


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple))
