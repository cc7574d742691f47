"""Matrix dims of parameters, by their logical names: which dims stack matrices, which form one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.sharding.rules import TABLE, VOCAB

Names = tuple[str | None, ...]

STACKING = ("layers", "expert")  # leading dims that only stack independent parameters
HEADS = ("heads", "kv_heads", "kv_shared")


def is_names(x: Any) -> bool:
    """Returns whether `x` is a leaf of a names tree: a plain tuple of logical names (optax's empty states are not)."""
    return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def map_names(f: Callable[..., Any], names: Any, *rest: Any) -> Any:
    """`jax.tree.map` over a tree whose leaves are tuples of logical names."""
    return jax.tree.map(f, names, *rest, is_leaf=is_names)


def stacking(names: Names) -> int:
    """Number of leading dims that stack independent parameters: (layers, expert, embed, mlp) -> 2."""
    count = 0
    while count < len(names) and names[count] in STACKING:
        count += 1
    return count


def features(names: Names) -> tuple[tuple[int, ...], ...]:
    """Dims of one parameter, stacking dims left out, heads and head_dim taken as one feature dim.

    (layers, embed, heads, head_dim) -> ((1,), (2, 3)); a query bias (layers, heads, head_dim) -> ((1, 2),).
    """
    groups: list[tuple[int, ...]] = []
    for dim in range(stacking(names), len(names)):
        if names[dim] == "head_dim" and groups and names[groups[-1][-1]] in HEADS:
            groups[-1] = (*groups[-1], dim)
        else:
            groups.append((dim,))
    return tuple(groups)


def is_selection(names: Names) -> bool:
    """Returns whether this is the selection bias of a mixture of experts: its dim is named `balance`."""
    return "balance" in names


def is_table(names: Names) -> bool:
    """Returns whether this is an embedding table: its width is named `table`, or, where it is the head too, vocab
    leads.
    """
    return TABLE in names or names[stacking(names) :][:1] == (VOCAB,)


def is_matrix(names: Names) -> bool:
    """Returns whether this is a weight matrix: two feature dims or more, not a norm, a bias or an embedding table."""
    return len(features(names)) >= 2 and not is_table(names)


def contraction(names: Names) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(dims of one side, dims of the other) of a matrix.

    `embed` is a side if it comes first (the residual stream is read or written, however many dims are on the other
    side); else the last dim is: (layers, expert, mlp, embed) -> ((2,), (3,)).
    """
    groups = features(names)
    first = len(groups) == 2 or names[groups[0][0]] == "embed"
    inputs, outputs = (groups[:1], groups[1:]) if first else (groups[:-1], groups[-1:])
    return tuple(d for group in inputs for d in group), tuple(d for group in outputs for d in group)
