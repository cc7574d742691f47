"""Logical names of the optimizer state, so that moments are sharded like their parameters (ZeRO)."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxtrain.optim.adafactor import factored_names
from jaxtrain.optim.param_dims import Names, is_names


def state_names(tx: optax.GradientTransformation, params: Any, names: Any) -> Any:
    """Returns a tree like `tx.init(params)` whose leaves are tuples of logical names.

    A leaf belongs to the parameter whose path is the longest suffix of its path. With the same shape it gets the names
    of the parameter; Adafactor's factored moments get them without the reduced dim; scalars get (); anything else is
    unnamed and thus replicated. Rajbhandari et al. 2020, arXiv 1910.02054.

    Args:
        tx: an optax transformation whose moments are trees like the parameters.
        params: tree of arrays or ShapeDtypeStructs.
        names: tree of tuples of logical names, like the parameters.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    names_by_path = dict(jax.tree_util.tree_leaves_with_path(names, is_leaf=is_names))

    def leaf_names(path: Any, leaf: Any) -> Names:
        shape = tuple(leaf.shape)
        for start in range(len(path) + 1):
            param = path[start:]
            if param not in shapes:
                continue
            param_names = names_by_path[param]
            factored = factored_names(param_names, shapes[param], _field(path[:start]))
            if factored is not None and len(factored) == len(shape):
                return factored
            return param_names if shape == shapes[param] else (None,) * len(shape)
        return (None,) * len(shape)

    return jax.tree_util.tree_map_with_path(leaf_names, jax.eval_shape(tx.init, params))


def _field(path: Any) -> str:
    """Returns the field of the state that a tree of moments is in, such as `mu` or `v_row`."""
    return getattr(path[-1], "name", "") if path else ""
