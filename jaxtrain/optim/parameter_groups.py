"""Groups of parameters with another learning rate or weight decay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import optax

from jaxtrain.config.schema import OptimizerConfig, ParameterGroupConfig
from jaxtrain.errors import UserError, join_words
from jaxtrain.optim.param_dims import Names, is_matrix, is_names, map_names

SHOWN = 6  # names in a message


def assign_groups(groups: Sequence[ParameterGroupConfig], names: Any) -> Any:
    """Returns a tree like the parameters with the index of the first group that matches each, or -1.

    Raises:
        UserError: a pattern matches no parameter.
    """
    used: set[str] = set()
    paths: list[str] = []
    logical: set[str] = set()

    def assign(path: Any, n: Names) -> int:
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        paths.append(where)
        logical.update(name for name in n if name is not None)
        found = -1
        for index, group in enumerate(groups):
            matching = [pattern for pattern in group.match if re.fullmatch(pattern, where) or pattern in n]
            used.update(matching)
            found = index if matching and found < 0 else found
        return found

    tree = jax.tree_util.tree_map_with_path(assign, names, is_leaf=is_names)
    for index, group in enumerate(groups):
        unused = [pattern for pattern in group.match if pattern not in used]
        if unused or not group.match:
            what = f"`{unused[0]}` matches no parameter" if unused else "it has no `match`"
            expected = f"expected a pattern of whole paths, such as {join_words(_some(paths))}, or a logical name"
            raise UserError(f"optimizer.groups.{index}.match: {what}; {expected}, such as {join_words(_some(logical))}")
    return tree


def _some(names: Iterable[str]) -> list[str]:
    return sorted(set(names))[:SHOWN]


def weight_decay(cfg: OptimizerConfig, assigned: Any, names: Any) -> optax.GradientTransformation:
    """Returns the decoupled weight decay of all groups; matrices alone decay outside of the groups that set it."""

    def decay(group: int, n: Names) -> float:
        own = cfg.groups[group].weight_decay if group >= 0 else None
        return own if own is not None else cfg.weight_decay if cfg.decay_all_parameters or is_matrix(n) else 0.0

    decays = map_names(lambda n, group: decay(group, n), names, assigned)
    values = sorted(set(jax.tree.leaves(decays)) - {0.0})
    parts = [
        optax.add_decayed_weights(value, jax.tree.map(lambda d, value=value: d == value, decays)) for value in values
    ]
    return optax.chain(*parts) if parts else optax.identity()


def scale_groups(
    tx: optax.GradientTransformationExtraArgs, groups: Sequence[ParameterGroupConfig], assigned: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with the updates of each group multiplied by its `lr_factor`; the state is that of `tx`."""
    if all(group.lr_factor == 1 for group in groups):
        return tx

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(updates, state, params, **extra)
        return jax.tree.map(lambda g, u: u if g < 0 else u * groups[g].lr_factor, assigned, updates), state

    return optax.GradientTransformationExtraArgs(tx.init, update)
