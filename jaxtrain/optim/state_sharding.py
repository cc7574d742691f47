"""Logical names of the optimizer state, so that moments are sharded like their parameters (ZeRO)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import optax

from jaxtrain.optim.adafactor import factored_names
from jaxtrain.optim.param_dims import Names, is_names, num_stacked_dims
from jaxtrain.sharding.rules import INFERRED


def state_names(tx: optax.GradientTransformation, params: Any, names: Any) -> Any:
    """Returns a tree like `tx.init(params)` whose leaves are tuples of logical names.

    A leaf belongs to the parameter whose path is the longest part of its path. With the same shape it gets the names of
    the parameter; Adafactor's factored moments get them without the reduced dim. Any other one keeps the names of
    leading stacked dims of the same size, and its largest other dim is `inferred`, to be stored in shards; so is that
    of a leaf that belongs to no parameter. Rajbhandari et al. 2020, arXiv 1910.02054.

    Args:
        tx: an optax transformation.
        params: tree of arrays or ShapeDtypeStructs.
        names: tree of tuples of logical names, like the parameters.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    names_by_path = dict(jax.tree_util.tree_leaves_with_path(names, is_leaf=is_names))

    def leaf_names(path: Any, leaf: Any) -> Names:
        shape, part = tuple(leaf.shape), parameter_of(path, shapes)
        if part is None:
            return _with_inferred((), shape)
        param, prefix = path[part], path[: part.start]
        param_names = names_by_path[param]
        if shape == shapes[param]:
            return param_names
        factored = factored_names(param_names, shapes[param], _field(prefix))
        if factored is not None and len(factored) == len(shape):
            return factored
        stacked = num_stacked_dims(param_names)
        is_same = shape[:stacked] == shapes[param][:stacked]
        return _with_inferred(param_names[:stacked] if is_same else (), shape)

    return jax.tree_util.tree_map_with_path(leaf_names, jax.eval_shape(tx.init, params))


def other_arrays(opt_state: Any, params: Any) -> list[tuple[str, Any]]:
    """Returns the arrays of an optimizer state that do not have the shape of a parameter, by path; scalars not.

    Args:
        opt_state: tree of arrays or ShapeDtypeStructs.
        params: likewise.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def is_other(path: Any, leaf: Any) -> bool:
        part = parameter_of(path, shapes)
        return leaf.size > 1 and (part is None or shapes[path[part]] != tuple(leaf.shape))

    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves if is_other(path, leaf)
    ]


def parameter_of(path: Any, parameters: Collection[Any]) -> slice | None:
    """Returns the part of a leaf's path that is the longest path of a parameter; None if there is none."""
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length + 1):
            if path[start : start + length] in parameters:
                return slice(start, start + length)
    return None


def _with_inferred(names: Names, shape: tuple[int, ...]) -> Names:
    """Completes names: the largest of the other dims is `inferred`."""
    rest = shape[len(names) :]
    if not rest or max(rest) == 1:
        return (*names, *(None,) * len(rest))
    largest = rest.index(max(rest))
    return (*names, *(INFERRED if d == largest else None for d in range(len(rest))))


def _field(path: Any) -> str:
    """Returns the field of the state that a tree of moments is in, such as `mu` or `v_row`."""
    return getattr(path[-1], "name", "") if path else ""
