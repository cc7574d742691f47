"""PowerSGD: means of matrices of low rank (Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.optim.param_dims import feature_dims, is_names, matrix_dims, num_stacked_dims
from jaxtrain.sync.compression.compressor import Compressor
from jaxtrain.sync.compression.wire import SAME, flat_mean, flat_mean_bytes, on_each_replica, stacked

Tree = Any
LEAST_SAVING = 1.0  # a matrix is compressed if that makes it smaller by more than this factor


class PowerSGD(Compressor):
    """`powersgd`: the mean of matrices M_i is P Q^T, of a given rank.

    With X_i = M_i + E_i: P = orth(mean_i X_i orth(Q)); Q <- mean_i X_i^T P; the mean is P Q^T; E_i <- X_i - P Q^T. Q is
    that of the mean before (warm start), at first a random one. Matrices are whole tensors, one layer or expert at a
    time. Vectors, and matrices that would not become smaller, travel in float32, with P: there are two all-reduces.
    """

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns Q of each matrix, by the place of the tensor, and with error feedback the errors E."""
        leaves, key = jax.tree.leaves(params), jax.random.key(0)
        factors = {}
        for i, (stack, _, n, rank) in self._matrices(leaves).items():
            factors[str(i)] = jax.random.normal(jax.random.fold_in(key, i), (stack, n, rank), jnp.float32)
        return {"factors": factors} | ({"worker": self.zeros(params)} if self.config.error_feedback else {})

    def mean(self, own: dict[str, Tree], x: Tree) -> tuple[dict[str, Tree], Tree]:
        """Returns (Q and errors, mean)."""
        if self.config.error_feedback:
            x = jax.tree.map(jnp.add, x, own["worker"])
        leaves, structure = jax.tree.flatten(x)
        sizes = self._matrices([leaf[0] for leaf in leaves])
        others = [i for i in range(len(leaves)) if i not in sizes]
        right = {i: self._orthogonal(own["factors"][str(i)]) for i in sizes}
        left = [self._product(leaves[i], right[i], sizes[i], "smn,snr->smr") for i in sizes]
        means = flat_mean([*left, *(leaves[i] for i in others)], self.mesh)
        left = dict(zip(sizes, map(self._orthogonal, means), strict=False))
        found = dict(zip(others, means[len(sizes) :], strict=True))
        factors = flat_mean([self._product(leaves[i], left[i], sizes[i], "smn,smr->snr") for i in sizes], self.mesh)
        for i, q in zip(sizes, factors, strict=True):
            found[i] = self._outer_product(left[i], q, leaves[i].shape[1:])
        mean = jax.tree.unflatten(structure, [found[i] for i in range(len(leaves))])
        kept = {"factors": {str(i): q for i, q in zip(sizes, factors, strict=True)}}
        if self.config.error_feedback:
            errors = [x - found[i][None] if i in sizes else jnp.zeros_like(x) for i, x in enumerate(leaves)]
            kept["worker"] = jax.tree.unflatten(structure, errors)
        return kept, mean

    def sent_bytes(self, params: Tree) -> int:
        """Returns the bytes of P, Q and what is not compressed, in float32."""
        leaves = jax.tree.leaves(params)
        sizes = self._matrices(leaves)
        first = [stack * m * rank for stack, m, _, rank in sizes.values()]
        first += [prod(p.shape) for i, p in enumerate(leaves) if i not in sizes]
        second = [stack * n * rank for stack, _, n, rank in sizes.values()]
        return round(sum(flat_mean_bytes(part, self.replicas, self.inner) for part in (first, second)))

    def _product(self, x: jax.Array, factor: jax.Array, sizes: tuple[int, ...], dims: str) -> jax.Array:
        """Returns the product of each replica's matrices with a factor that is the same for all."""

        def one(x: jax.Array, factor: jax.Array) -> jax.Array:
            return jnp.einsum(dims, x[0].reshape(sizes[:3]), factor, precision=jax.lax.Precision.HIGHEST)[None]

        return on_each_replica(self.mesh, one, (stacked(self.mesh), SAME))(x, factor)

    def _outer_product(self, left: jax.Array, right: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns P Q^T as a tensor."""

        def one(left: jax.Array, right: jax.Array) -> jax.Array:
            return jnp.einsum("smr,snr->smn", left, right, precision=jax.lax.Precision.HIGHEST).reshape(shape)

        return on_each_replica(self.mesh, one, SAME, SAME)(left, right)

    def _orthogonal(self, x: jax.Array) -> jax.Array:
        """Returns matrices with orthonormal columns that span those of `x`, [..., rows, rank] with rank <= rows."""
        return on_each_replica(self.mesh, lambda x: jnp.linalg.qr(x)[0], SAME, SAME)(x)

    def _matrices(self, leaves: list[Any]) -> dict[int, tuple[int, int, int, int]]:
        """Returns {place of a tensor: (matrices in it, rows, columns, rank)} of those that are compressed."""
        found = {}
        names = jax.tree.leaves(self.names, is_leaf=is_names)
        for i, (leaf, own) in enumerate(zip(leaves, names, strict=True)):
            if len(feature_dims(own)) < 2:
                continue
            m, n = (prod(leaf.shape[dim] for dim in dims) for dims in matrix_dims(own))
            rank = min(self.config.rank, m, n)
            if rank * (m + n) * LEAST_SAVING < m * n:
                found[i] = (prod(leaf.shape[: num_stacked_dims(own)]), m, n, rank)
        return found
