"""Rules map the logical name of a dim to mesh axes. No JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxtrain.config.errors import UserError

Names = tuple[str | None, ...]
Rules = Mapping[str, tuple[str, ...]]

# Logical names of activation dims; parameters add embed, heads, kv_heads, head_dim, mlp, vocab, layers, expert.
BATCH, SEQUENCE, CONTEXT = "batch", "sequence", "context"


def axes_of(name: str | None, rules: Rules) -> tuple[str, ...]:
    """Mesh axes of one dim; an unnamed dim, or a name without a rule, is not sharded."""
    return () if name is None else rules.get(name, ())


def dims_to_axes(names: Sequence[str | None], rules: Rules) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of every dim of a tensor.

    Raises:
        ValueError: a mesh axis would shard two dims of the tensor.
    """
    dims = tuple(axes_of(name, rules) for name in names)
    used = [axis for axes in dims for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            where = " and ".join(f"`{name}`" for name, axes in zip(names, dims) if axis in axes)
            raise UserError(f"axis `{axis}` is used twice on a tensor ({', '.join(map(str, names))}): by {where}")
    return dims


def storage_axes(rules: Rules) -> frozenset[str]:
    """Axes over which weights are only *stored* in shards: those that split the tokens.

    A weight meets every token, so over the axes that shard the batch (or the context) it must be gathered
    before use: this is FSDP. Over the other axes (tensor and expert parallel) it is used as it is stored.
    """
    return frozenset(axes_of(BATCH, rules) + axes_of(CONTEXT, rules))


def without(names: Sequence[str | None], axes: Iterable[str], rules: Rules) -> tuple[tuple[str, ...], ...]:
    """`dims_to_axes` less the given axes."""
    dropped = frozenset(axes)
    return tuple(tuple(a for a in dim if a not in dropped) for dim in dims_to_axes(names, rules))
