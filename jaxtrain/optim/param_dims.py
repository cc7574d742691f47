"""Roles of the dims of parameters, by their logical names: which dims stack matrices, and which form one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.sharding.rules import TABLE, VOCAB

Names = tuple[str | None, ...]

STACKED = ("layers", "expert")  # leading dims that stack independent parameters
HEADS = ("heads", "kv_heads", "kv_shared")


def is_names(x: Any) -> bool:
    """Returns whether `x` is a leaf of a tree of names: a tuple of logical names, but no NamedTuple of optax."""
    return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def map_names(f: Callable[..., Any], names: Any, *rest: Any) -> Any:
    """Applies `jax.tree.map` to a tree whose leaves are tuples of logical names."""
    return jax.tree.map(f, names, *rest, is_leaf=is_names)


def num_stacked_dims(names: Names) -> int:
    """Returns the number of leading dims that stack independent parameters: (layers, expert, embed, mlp) -> 2."""
    count = 0
    while count < len(names) and names[count] in STACKED:
        count += 1
    return count


def feature_dims(names: Names) -> tuple[tuple[int, ...], ...]:
    """Returns the dims of one parameter without the stacked ones; heads and head_dim are one feature dim.

    (layers, embed, heads, head_dim) -> ((1,), (2, 3)); a query bias (layers, heads, head_dim) -> ((1, 2),).
    """
    groups: list[tuple[int, ...]] = []
    for dim in range(num_stacked_dims(names), len(names)):
        if names[dim] == "head_dim" and groups and names[groups[-1][-1]] in HEADS:
            groups[-1] = (*groups[-1], dim)
        else:
            groups.append((dim,))
    return tuple(groups)


def is_selection_bias(names: Names) -> bool:
    """Returns whether this is a selection bias of experts: its dim is named `balance`."""
    return "balance" in names


def is_embedding_table(names: Names) -> bool:
    """Returns whether this is an embedding table: it has a dim `table`, or, tied to the head, `vocab` first."""
    return TABLE in names or names[num_stacked_dims(names) :][:1] == (VOCAB,)


def is_matrix(names: Names) -> bool:
    """Returns whether this is a weight matrix: two feature dims or more, not a norm, a bias or an embedding table."""
    return len(feature_dims(names)) >= 2 and not is_embedding_table(names)


def matrix_dims(names: Names) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the (input dims, output dims) of a matrix.

    If `embed` comes first, it is the input and all others are the output; else the last dim is the output:
    (layers, expert, mlp, embed) -> ((2,), (3,)).
    """
    groups = feature_dims(names)
    is_first_input = len(groups) == 2 or names[groups[0][0]] == "embed"
    inputs, outputs = (groups[:1], groups[1:]) if is_first_input else (groups[:-1], groups[-1:])
    return tuple(d for group in inputs for d in group), tuple(d for group in outputs for d in group)
