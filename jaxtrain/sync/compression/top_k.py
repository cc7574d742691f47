"""Deep gradient compression: means of the largest values (Lin et al. 2018, arXiv 1712.01887)."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.optim.param_dims import is_names, num_stacked_dims
from jaxtrain.sync.compression.clipping import clip_replicas
from jaxtrain.sync.compression.compressor import Compressor
from jaxtrain.sync.compression.wire import (
    SAME,
    flat_mean,
    flat_mean_bytes,
    gather_flat,
    on_each_device,
    padded,
    split_flat,
    stacked,
)

Tree = Any
SMALLEST = 1024  # values of a tensor that is worth it; smaller ones travel whole


class TopK(Compressor):
    """`topk`: each replica sends the largest values of each layer, with their indices, and keeps the rest.

    With the gradient G_i: U_i <- momentum U_i + G_i; V_i <- V_i + U_i; the values of V_i that are sent are those of the
    largest magnitude, a `share` of the layer; the mean has their sum over replicas / replicas; where they were, V_i and
    U_i become 0 (factor masking). Without momentum U_i is G_i. With `clip` G_i is clipped first, see `clip_replicas`.
    In the warm-up the share is larger, see `first_phases`.

    Every device of a replica chooses from the whole layer, which it holds for that moment: XLA's partitioner aborts on
    gathers and scatters of some sharded tensors in code that is manual over some axes.
    """

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns V, what was not sent yet, with error feedback, and U with momentum."""
        own = {"worker": self.zeros(params)} if self.config.error_feedback else {}
        return own | ({"velocity": self.zeros(params)} if self.config.momentum else {})

    def mean(self, own: dict[str, Tree], x: Tree) -> tuple[dict[str, Tree], Tree]:
        """Returns (V and U, mean)."""
        x = clip_replicas(x, self.config.clip, self.names)[0]
        if self.config.momentum:
            x = jax.tree.map(lambda u, g: self.config.momentum * u + g, own["velocity"], x)
        total = jax.tree.map(jnp.add, own["worker"], x) if self.config.error_feedback else x
        leaves, structure = jax.tree.flatten(total)
        velocity, sizes = jax.tree.leaves(x), self._sizes([leaf[0] for leaf in leaves])
        others = [i for i in range(len(leaves)) if i not in sizes]
        found = dict(zip(others, flat_mean([leaves[i] for i in others], self.mesh), strict=True))
        for i in others:
            leaves[i] = jnp.zeros_like(leaves[i])
        packed = []
        for i, size in sizes.items():
            sent, leaves[i], velocity[i] = self._take(leaves[i], velocity[i], size)
            packed.append(sent)
        if packed:
            received = gather_flat(jnp.concatenate(packed, 1), self.mesh)
            shapes = {i: leaves[i].shape[1:] for i in sizes}
            found |= on_each_device(self.mesh, lambda sent: self._sums(sent, sizes, shapes), SAME, SAME)(received)
        kept = {"worker": jax.tree.unflatten(structure, leaves)} if self.config.error_feedback else {}
        if self.config.momentum:
            kept["velocity"] = jax.tree.unflatten(structure, velocity)
        return kept, jax.tree.unflatten(structure, [found[i] for i in range(len(leaves))])

    def sent_bytes(self, params: Tree) -> int:
        """Returns the bytes of values and indices, and of what is sent whole, in float32."""
        leaves = jax.tree.leaves(params)
        sizes = self._sizes(leaves)
        whole = [prod(p.shape) for i, p in enumerate(leaves) if i not in sizes]
        sent = sum(2 * stack * count for stack, _, count in sizes.values())
        gathered = 4 * padded(sent, self.inner) * (self.replicas - 1)
        return round(gathered + flat_mean_bytes(whole, self.replicas, self.inner))

    def _take(self, total: jax.Array, velocity: jax.Array, size: tuple[int, int, int]) -> tuple[jax.Array, ...]:
        """Returns values and indices that each replica sends, int32 [replicas, 2 * count], and V and U without them."""
        stack, width, count = size

        def take(total: jax.Array, velocity: jax.Array) -> tuple[jax.Array, ...]:
            flat = total.reshape(stack, width)
            indices = jax.lax.top_k(jnp.abs(flat), count)[1]
            values = jnp.take_along_axis(flat, indices, 1)
            rows = jnp.arange(stack)[:, None]
            kept = (x.reshape(stack, width).at[rows, indices].set(0.0).reshape(total.shape) for x in (flat, velocity))
            bits = jax.lax.bitcast_convert_type(values, jnp.int32)
            return jnp.stack([bits, indices.astype(jnp.int32)]).reshape(1, -1), *kept

        return on_each_device(self.mesh, take, stacked(self.mesh), stacked(self.mesh))(total, velocity)

    def _sums(self, sent: jax.Array, sizes: dict[int, Any], shapes: dict[int, Any]) -> dict[int, jax.Array]:
        """Returns the means of tensors from what all replicas sent, summed in their order, so that it is repeatable."""
        parts, found = split_flat(sent, [(2, stack, count) for stack, _, count in sizes.values()]), {}
        for (i, (stack, width, _)), part in zip(sizes.items(), parts, strict=True):
            rows, total = jnp.arange(stack)[:, None], jnp.zeros((stack, width), jnp.float32)
            for bits, indices in part:
                values = jax.lax.bitcast_convert_type(bits, jnp.float32)
                total = total.at[rows, indices].add(values, unique_indices=True)
            found[i] = total.reshape(shapes[i]) / self.replicas
        return found

    def _sizes(self, leaves: list[Any]) -> dict[int, tuple[int, int, int]]:
        """Returns {place of a tensor: (layers, values of a layer, values that are sent)} of those that are large."""
        found = {}
        names = jax.tree.leaves(self.names, is_leaf=is_names)
        for i, (leaf, own) in enumerate(zip(leaves, names, strict=True)):
            if prod(leaf.shape) >= SMALLEST:
                stack = prod(leaf.shape[: num_stacked_dims(own)])
                width = prod(leaf.shape) // stack
                found[i] = (stack, width, ceil(self.config.share * width))
        return found
