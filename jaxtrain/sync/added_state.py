"""The part of the state that a strategy adds: its shapes, and where they lie."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import UserError, describe_error
from jaxtrain.sync.replica_dim import stacked_sharding
from jaxtrain.sync.strategy import Strategy

Tree = Any


def placed_state(strategy: Strategy, params: Tree) -> dict[str, Tree]:
    """Returns what a strategy adds to the state with shardings, for parameters that have them.

    A tree like the parameters is sharded as they are. If its arrays have a leading dim of the replicas, that is sharded
    over them; arrays of another shape after that dim are sharded over it alone. Others are replicated. What has `specs`
    lies as these say.

    Raises:
        UserError: its `init` fails, or returns something else than a dict of trees of arrays.
    """
    replicas, axis = strategy.replicas, strategy.axis

    def place(leaf: Any, p: Any) -> Any:
        if leaf.shape == p.shape:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=p.sharding)
        if leaf.shape == (replicas, *p.shape):
            like = jax.ShapeDtypeStruct(p.shape, leaf.dtype, sharding=p.sharding)
            return stacked_sharding(like, replicas, axis)
        if leaf.ndim > 1 and leaf.shape[0] == replicas and replicas % p.sharding.mesh.shape[axis] == 0:
            spec = PartitionSpec(axis)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(p.sharding.mesh, spec))
        return replicated(leaf, params)

    mesh, specs = jax.tree.leaves(params)[0].sharding.mesh, strategy.specs(params)

    def place_by(leaf: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def place_tree(name: str, tree: Tree) -> Tree:
        if name in specs:
            return jax.tree.map(place_by, tree, specs[name])
        if jax.tree.structure(tree) != jax.tree.structure(params):
            return jax.tree.map(lambda leaf: replicated(leaf, params), tree)
        return jax.tree.map(place, tree, params)

    return {name: place_tree(name, tree) for name, tree in added_state(strategy, params).items()}


def replicated(leaf: Any, params: Tree) -> jax.ShapeDtypeStruct:
    """Returns an abstract array on every device of the mesh of some parameters."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def added_state(strategy: Strategy, params: Tree) -> dict[str, Tree]:
    """Returns shapes and dtypes of what a strategy adds to the state.

    Raises:
        UserError: its `init` fails, or returns something else than a dict of trees of arrays.
    """
    where = f"sync.strategy: {strategy.config.strategy}: its `init`"
    found: list[Any] = []

    def init(params: Tree) -> Tree:
        found.append(strategy.init(params))
        bad = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(found[0]) if not hasattr(x, "shape")]
        if bad or not isinstance(found[0], dict):
            path, value = bad[0] if bad else ((), found[0])
            name = f"own{jax.tree_util.keystr(path)}"
            kind = type(value).__name__
            raise UserError(f"{where} returns {name} of type {kind}; expected a dict of trees of arrays")
        return found[0]

    try:
        return jax.eval_shape(init, params)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where} fails: {describe_error(error)}") from error
