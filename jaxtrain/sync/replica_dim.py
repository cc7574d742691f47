"""The leading replica dim of a tree: averages over it, copies along it, and its sharding."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any


def spread(tree: Tree, replicas: int) -> Tree:
    """Returns the same values for all replicas, [replicas, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (replicas, *x.shape)), tree)


def average(tree: Tree, weights: jax.Array) -> Tree:
    """Returns the weighted average over replicas, summed in float32; integers are those of the first with a weight.

    Replicas of weight 0 need not be finite. One replica is copied bit for bit. Without any weight the average is NaN.
    """
    is_any = weights.sum() > 0
    first = jnp.arange(len(weights)) == jnp.argmax(weights > 0)

    def one(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.sum(jnp.where(along(first, x), x, jnp.zeros((), x.dtype)), 0, dtype=x.dtype)
        share = along(weights, x)
        mean = jnp.sum(jnp.where(share > 0, share * x.astype(jnp.float32), 0.0), 0)
        return jnp.where(is_any, mean, jnp.nan).astype(x.dtype)

    return jax.tree.map(one, tree)


def are_finite(tree: Tree) -> jax.Array:
    """Returns which replicas hold finite numbers alone, bool [replicas]."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(x).all(tuple(range(1, x.ndim))) for x in leaves]), 0)


def shares(tokens: jax.Array, is_present: jax.Array) -> jax.Array:
    """Returns the share of each replica in the tokens of those present, of sum 1; 0 if none is.

    Without any tokens those present count alike.
    """
    weights = jnp.where(is_present, tokens, 0.0)
    weights = jnp.where(weights.sum() > 0, weights, is_present.astype(jnp.float32))
    total = weights.sum()
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)


def distance(tree: Tree, mean: Tree, is_present: jax.Array) -> jax.Array:
    """Returns the root mean square over the present replicas of the distance from the mean: the consensus distance."""

    def squares(x: jax.Array, m: jax.Array) -> jax.Array:
        difference = x.astype(jnp.float32) - m.astype(jnp.float32)[None]
        return jnp.where(along(is_present, x), difference**2, 0.0).sum(tuple(range(1, x.ndim)))

    sums = jax.tree.leaves(jax.tree.map(squares, tree, mean))
    count = jnp.maximum(is_present.sum(), 1)
    return jnp.sqrt(jnp.sum(jnp.stack(sums)) / count)


def choose(is_first: jax.Array, a: Tree, b: Tree) -> Tree:
    """Returns the replicas of `a` where `is_first`, bool [replicas], and else those of `b`."""
    return jax.tree.map(lambda x, y: jnp.where(along(is_first, x), x, y), a, b)


def stacked_sharding(leaf: Any, replicas: int, axis: str) -> jax.ShapeDtypeStruct:
    """Returns an abstract array with a replica dim in front, sharded over its mesh axis if that divides it.

    Each replica holds its values whole where that axis also shards the array (ZeRO over `data`).
    """
    sharding = leaf.sharding
    mesh: Mesh = sharding.mesh
    over = axis if replicas % mesh.shape[axis] == 0 else None
    spec = PartitionSpec(over, *without_axis(sharding.spec, axis))
    return jax.ShapeDtypeStruct((replicas, *leaf.shape), leaf.dtype, sharding=NamedSharding(mesh, spec))


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """Returns a PartitionSpec in which no dim is sharded over a mesh axis."""
    dims = ((dim,) if isinstance(dim, str) else dim for dim in spec)
    return PartitionSpec(*(dim and (tuple(each for each in dim if each != axis) or None) for dim in dims))


def along(values: jax.Array, x: jax.Array) -> jax.Array:
    """Returns [replicas] as [replicas, 1, ...] like `x`."""
    return values.reshape(-1, *(1,) * (x.ndim - 1))


def key_of_replica(key: jax.Array, replica: jax.Array) -> jax.Array:
    """Returns the data of the random key of a replica; that of replica 0 is the given one."""
    folded = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), replica))
    return jnp.where(replica == 0, key, folded)


def divided(shape: tuple[int, ...], mesh: Mesh, axis: str, *between: None) -> PartitionSpec:
    """Returns the spec of [replicas, ..., parts, values], whose parts are sharded over the devices of a replica.

    Replicas or parts that their devices do not divide are not sharded.

    Args:
        shape: of the array.
        mesh: the mesh.
        axis: mesh axis of the replicas; all others are those of a replica.
        between: a None for each dim between replicas and parts.
    """
    inner = tuple(name for name in mesh.axis_names if name != axis)
    has_parts = shape[-2] % prod(mesh.shape[name] for name in inner) == 0
    return PartitionSpec(axis if shape[0] % mesh.shape[axis] == 0 else None, *between, inner if has_parts else None)
