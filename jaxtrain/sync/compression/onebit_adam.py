"""1-bit Adam: momenta of which the signs travel, after the second moment is frozen (Tang et al., arXiv 2102.02888)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.param_dims import Names, num_stacked_dims
from jaxtrain.sync.compression.clipping import clip_replicas
from jaxtrain.sync.compression.compressor import QuantizedBlocks
from jaxtrain.sync.compression.wire import SAME, on_each_replica, stacked
from jaxtrain.sync.quantized_mean import ONE_BIT_BLOCK, Bits

Tree = Any
BYTE = 8  # signs in it


@dataclass(frozen=True)
class Momenta:
    """The first moments of Adam that each replica would go on with from the one that all hold: b1 m + (1 - b1) G_i.

    Attributes:
        decay: b1.
        max_norm: global norm of the batch's gradient above which those of replicas are clipped, see `clip_replicas`.
        names: logical names of the dims of the parameters.
    """

    decay: float
    max_norm: float | None
    names: Tree

    def __call__(self, grads: Tree, opt_state: Any) -> tuple[Tree, dict[str, jax.Array]]:
        """Returns the moments, float32 [replicas, ...], and `grad_norm`, the mean of the norms of the replicas.

        Parameters without a moment, such as selection biases of experts, keep their gradients.
        """
        clipped, norms = clip_replicas(grads, self.max_norm, self.names)
        held = dict(jax.tree_util.tree_leaves_with_path(optax.tree.get(opt_state, "mu")))

        def one(path: Any, g: jax.Array) -> jax.Array:
            g = g.astype(jnp.float32)
            return self.decay * held[path].astype(jnp.float32) + (1 - self.decay) * g if path in held else g

        return jax.tree_util.tree_map_with_path(one, clipped), {"grad_norm": norms.mean()}


class OneBit(QuantizedBlocks):
    """`onebit_adam`: as `QuantizedBlocks`, in 1 bit: the signs of blocks, and a scale that keeps their magnitude.

    Blocks are equal parts of a layer, of at most 1,024 values. Layers that have no such parts travel in float32.
    """

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns residuals of the workers and the servers, with error feedback."""
        own = super().init(self._rows(params))
        return own | ({"worker": self.zeros(params)} if own else {})

    def specs(self, params: Tree) -> dict[str, Tree]:
        """Returns those of the servers' residuals."""
        return super().specs(self._rows(params))

    def mean(self, own: dict[str, Tree], x: Tree) -> tuple[dict[str, Tree], Tree]:
        """Returns (residuals, mean)."""
        params = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), x)
        rows = self._rows(params)
        own, mean = super().mean(self._with_worker(own, rows), self._reshape(x, rows))
        return self._with_worker(own, params), self._reshape(mean, params, is_stacked=False)

    def sent_bytes(self, params: Tree) -> int:
        """Returns the bytes of signs, scales, and what is not quantised."""
        return super().sent_bytes(self._rows(params))

    def _rows(self, params: Tree) -> Tree:
        """Returns the shapes of tensors whose rows are blocks of a layer; those that have none stay as they are."""

        def one(p: Any, names: Names) -> jax.ShapeDtypeStruct:
            layer, (least, most) = prod(p.shape[num_stacked_dims(names) :]), ONE_BIT_BLOCK
            block = next((size for size in range(most, least - 1, -BYTE) if layer % size == 0), None)
            shape = p.shape if block is None else (prod(p.shape) // block, block)
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        return jax.tree.map(one, params, self.names)

    def _with_worker(self, own: dict[str, Tree], shapes: Tree) -> dict[str, Tree]:
        return {**own, "worker": self._reshape(own["worker"], shapes)} if own else {}

    def _reshape(self, tree: Tree, shapes: Tree, is_stacked: bool = True) -> Tree:
        """Returns tensors in other shapes; within each replica, so that the partitioner sends nothing between them."""
        spec = stacked(self.mesh) if is_stacked else SAME

        def one(v: jax.Array, like: Any) -> jax.Array:
            return v.reshape(*v.shape[: len(spec)], *like.shape)

        return on_each_replica(self.mesh, lambda tree: jax.tree.map(one, tree, shapes), spec, spec)(tree)

    @property
    def _bits(self) -> Bits:
        return 1
