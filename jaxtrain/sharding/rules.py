"""Rules that map the logical name of a tensor dim to mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm, prod

from jaxtrain.errors import UserError

Names = tuple[str | None, ...]
Rules = Mapping[str, tuple[str, ...]]
Dims = tuple[tuple[str, ...], ...]  # mesh axes of every dim

# Logical names of activation dims; parameters also have heads, kv_heads, head_dim and mlp.
BATCH, SEQUENCE, CONTEXT = "batch", "sequence", "context"
EMBED, LAYERS, EXPERT, VOCAB = "embed", "layers", "expert", "vocab"
ROWS = "rows"  # rows of a cache of keys and values
TABLE = "table"  # width of an embedding table
INFERRED = "inferred"  # dim of a variable without names that is stored in shards
KV_SHARED = "kv_shared"  # key/value heads that are fewer than their shards, and so replicated
FSDP_AXIS = "fsdp"  # mesh axis of parameters that are stored in shards
DATA_AXIS = "data"  # mesh axis of replicated parameters, over which ZeRO shards the train state
REPLICA_AXIS = "replica"  # mesh axis of replicas that may synchronise loosely
PIPELINE_AXIS = "pipeline"  # mesh axis of pipeline stages


def axes_of(name: str | None, rules: Rules) -> tuple[str, ...]:
    """Returns the mesh axes of a dim; a dim without a name or a rule is not sharded."""
    return () if name is None else rules.get(name, ())


def dims_to_axes(names: Sequence[str | None], rules: Rules) -> Dims:
    """Returns the mesh axes of every dim of a tensor (see `requested_axes`).

    Raises:
        UserError: a mesh axis would shard two dims of the tensor.
    """
    dims = requested_axes(names, rules)
    used = [axis for axes in dims for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            where = " and ".join(f"`{name}`" for name, axes in zip(names, dims) if axis in axes)
            raise UserError(f"axis `{axis}` is used twice on a tensor ({', '.join(map(str, names))}): by {where}")
    return dims


def requested_axes(names: Sequence[str | None], rules: Rules) -> Dims:
    """Returns the axes that the rules request for each dim of a tensor, valid or not.

    In a tensor with a dim `expert`, only that dim gets the axes that split both experts and tokens. With
    `embed: [fsdp, expert]`, a dense weight is stored over both axes, and an expert's own `embed` over `fsdp`.
    """
    dims = tuple(axes_of(name, rules) for name in names)
    if EXPERT not in names:
        return dims
    expert_axes = frozenset(axes_of(EXPERT, rules)) & storage_axes(rules)
    return tuple(
        dim if name == EXPERT else tuple(a for a in dim if a not in expert_axes) for name, dim in zip(names, dims)
    )


def storage_axes(rules: Rules, names: Sequence[str | None] = ()) -> frozenset[str]:
    """Returns the axes over which a weight is only *stored* in shards: those that split the tokens.

    Every token needs every weight, so a weight is gathered over these axes before use (FSDP). Over other axes (tensor
    parallel) it is used in shards. So is a weight with a dim `expert` over the axes of the experts, because tokens are
    sent there.
    """
    token_axes = frozenset(axes_of(BATCH, rules) + axes_of(CONTEXT, rules))
    return token_axes - frozenset(axes_of(EXPERT, rules)) if EXPERT in names else token_axes


def dims_without_axes(names: Sequence[str | None], axes: Iterable[str], rules: Rules) -> Dims:
    """Returns `dims_to_axes` without the given axes."""
    dropped = frozenset(axes)
    return tuple(tuple(a for a in dim if a not in dropped) for dim in dims_to_axes(names, rules))


def with_implied_rules(rules: Rules, zero: int) -> Rules:
    """Returns the rules with those that follow from them.

    ZeRO stage 3 stores weights in shards over the data axis, as FSDP does. The width of an embedding table has the axes
    of the vocabulary and of `embed`: each device looks up whole rows of its columns, and only activations are sent. The
    `inferred` dim of a variable without names has the axes that only store `embed` in shards, else `fsdp`.
    """
    if zero >= 3 and DATA_AXIS in axes_of(BATCH, rules) and DATA_AXIS not in axes_of(EMBED, rules):
        rules = {**rules, EMBED: (*axes_of(EMBED, rules), DATA_AXIS)}
    table_axes = tuple(dict.fromkeys((*axes_of(VOCAB, rules), *axes_of(EMBED, rules))))
    if TABLE not in rules and table_axes:
        rules = {**rules, TABLE: table_axes}
    stored = storage_axes(rules)
    inferred = tuple(axis for axis in axes_of(EMBED, rules) or (FSDP_AXIS,) if axis in stored)
    return rules if INFERRED in rules or not inferred else {**rules, INFERRED: inferred}


def compute_dims(names: Sequence[str | None], shape: Sequence[int], rules: Rules, sizes: Mapping[str, int]) -> Dims:
    """Returns the mesh axes of every dim of a parameter as the model uses it.

    These are the axes of the rules. If stages cannot hold equal numbers of layers, the dim `layers` is not sharded and
    its axes shard another dim; a pipeline sends every stage its layers at the beginning of a step.
    """
    dims = dims_to_axes(names, rules)
    for d, name in enumerate(names):
        if name == LAYERS and shape[d] % prod(sizes.get(axis, 1) for axis in dims[d]):
            return _shard_another_dim(names, shape, (*dims[:d], (), *dims[d + 1 :]), dims[d], sizes)
    return dims


def storage_dims(
    names: Sequence[str | None], shape: Sequence[int], rules: Rules, sizes: Mapping[str, int], zero: int
) -> Dims:
    """Returns the mesh axes of every dim of a tensor of the train state.

    From ZeRO stage 1 on (Rajbhandari et al. 2020, arXiv 1910.02054) the data axis also shards the first dim that it
    divides: `embed`, else the largest. Layers are not sharded so, because a scan reads them one by one. A tensor
    without such a dim keeps the axes of the rules.
    """
    dims = compute_dims(names, shape, rules, sizes)
    if zero == 0 or sizes.get(DATA_AXIS, 1) == 1 or DATA_AXIS not in axes_of(BATCH, rules):
        return dims
    return (
        dims if any(DATA_AXIS in dim for dim in dims) else _shard_another_dim(names, shape, dims, (DATA_AXIS,), sizes)
    )


def _shard_another_dim(
    names: Sequence[str | None], shape: Sequence[int], dims: Dims, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> Dims:
    """Adds axes to the first dim that they divide: `embed`, else the largest, but not layers."""
    free = (d for d, name in enumerate(names) if name != LAYERS)
    for d in sorted(free, key=lambda d: (names[d] not in (EMBED, TABLE), -shape[d])):
        if shape[d] % prod(sizes.get(axis, 1) for axis in (*dims[d], *axes)) == 0:
            return (*dims[:d], (*dims[d], *axes), *dims[d + 1 :])
    return dims


def table_names(embed: int, tied: bool, shards: int) -> Names:
    """Returns the logical names of an embedding table: those of a head if it is one, or if `embed` does not divide."""
    return (VOCAB, EMBED) if tied or embed % shards else (None, TABLE)


def kv_copies(heads: int, kv_heads: int, shards: int) -> int:
    """Returns how often each key/value head is repeated so that `shards` can split them: 1 if they divide.

    The *weights* of heads that are fewer than the shards are replicated and repeated for use: repeated keys and values
    would be sent and kept several times. Also 1 if the query heads cannot follow, which is an error elsewhere.
    """
    copies = lcm(kv_heads, shards) // kv_heads
    return copies if heads % (kv_heads * copies) == 0 else 1
