"""Logical names of optimizer state, so that every moment lives where its parameter lives (ZeRO)."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxtrain.optim.adafactor import reduced_names
from jaxtrain.optim.param_dims import Names, is_names


def state_names(tx: optax.GradientTransformation, params: Any, names: Any) -> Any:
    """Tree like `tx.init(params)` whose leaves are tuples of logical names.

    A leaf belongs to the parameter whose path is the longest end of its own path. Of the same shape it gets the
    same names; Adafactor's factored moments get them without the reduced dim; scalars get (); anything else is
    unnamed, that is replicated. Rajbhandari et al. 2020, arXiv 1910.02054.

    Args:
        tx: from `optimizer`, or any optax transformation whose moments are trees like the parameters.
        params: tree of arrays or ShapeDtypeStructs; nothing is computed.
        names: the same tree of logical-name tuples.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    of_path = dict(jax.tree_util.tree_leaves_with_path(names, is_leaf=is_names))

    def leaf_names(path: Any, leaf: Any) -> Names:
        shape = tuple(leaf.shape)
        for start in range(len(path) + 1):
            owner = path[start:]
            if owner not in shapes:
                continue
            own = of_path[owner]
            reduced = reduced_names(own, shapes[owner], _field(path[:start]))
            if reduced is not None and len(reduced) == len(shape):
                return reduced
            return own if shape == shapes[owner] else (None,) * len(shape)
        return (None,) * len(shape)

    return jax.tree_util.tree_map_with_path(leaf_names, jax.eval_shape(tx.init, params))


def _field(path: Any) -> str:
    """Name of the state field that holds a tree of moments, such as `mu` or `v_row`."""
    return getattr(path[-1], "name", "") if path else ""
