"""Rules map the logical name of a dim to mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm, prod

from jaxtrain.errors import UserError

Names = tuple[str | None, ...]
Rules = Mapping[str, tuple[str, ...]]

# Logical names of activation dims; parameters add embed, heads, kv_heads, head_dim, mlp, vocab, table, layers, expert.
BATCH, SEQUENCE, CONTEXT = "batch", "sequence", "context"
EMBED, LAYERS, EXPERT, VOCAB = "embed", "layers", "expert", "vocab"
ROWS = "rows"  # of a cache of keys and values
TABLE = "table"  # width of an embedding whose rows are looked up
KV_SHARED = "kv_shared"  # key/value heads that are fewer than their shards: whole on each
REPLICAS = "data"  # the mesh axis of replicas, over which ZeRO spreads what they would all hold
STAGES = "pipeline"  # the mesh axis of pipeline stages, which hold layers


def axes_of(name: str | None, rules: Rules) -> tuple[str, ...]:
    """Mesh axes of one dim; an unnamed dim, or a name without a rule, is not sharded."""
    return () if name is None else rules.get(name, ())


def dims_to_axes(names: Sequence[str | None], rules: Rules) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of every dim of a tensor (see `asked`).

    Raises:
        ValueError: a mesh axis would shard two dims of the tensor.
    """
    dims = asked(names, rules)
    used = [axis for axes in dims for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            where = " and ".join(f"`{name}`" for name, axes in zip(names, dims) if axis in axes)
            raise UserError(f"axis `{axis}` is used twice on a tensor ({', '.join(map(str, names))}): by {where}")
    return dims


def asked(names: Sequence[str | None], rules: Rules) -> tuple[tuple[str, ...], ...]:
    """Returns the axes that the rules ask for each dim of a tensor, possible or not.

    In a tensor with a dim `expert`, that dim alone has the axes that split both the experts and the tokens: with
    `embed: [fsdp, expert]` a dense weight is stored over both axes, an expert's own over `fsdp`.
    """
    dims = tuple(axes_of(name, rules) for name in names)
    if EXPERT not in names:
        return dims
    own = frozenset(axes_of(EXPERT, rules)) & storage_axes(rules)
    return tuple(dim if name == EXPERT else tuple(a for a in dim if a not in own) for name, dim in zip(names, dims))


def storage_axes(rules: Rules, names: Sequence[str | None] = ()) -> frozenset[str]:
    """Axes over which a weight with these dims is only *stored* in shards: those that split the tokens.

    A weight meets every token, so over the axes that shard the batch (or the context) it must be gathered
    before use: this is FSDP. Over the other axes (tensor parallel) it is used as it is stored, and so is a weight
    with a dim `expert` over the axes of the experts, to which tokens travel.
    """
    split = frozenset(axes_of(BATCH, rules) + axes_of(CONTEXT, rules))
    return split - frozenset(axes_of(EXPERT, rules)) if EXPERT in names else split


def without(names: Sequence[str | None], axes: Iterable[str], rules: Rules) -> tuple[tuple[str, ...], ...]:
    """`dims_to_axes` less the given axes."""
    dropped = frozenset(axes)
    return tuple(tuple(a for a in dim if a not in dropped) for dim in dims_to_axes(names, rules))


def full_rules(rules: Rules, zero: int) -> Rules:
    """The rules with those that follow from them.

    In ZeRO stage 3 weights are stored in shards over the replicas, as in FSDP. An embedding's width has the axes of the
    vocabulary and those of other weights' width: rows are looked up in full where they are, and all that moves is
    parts of them, by all-to-alls.
    """
    if zero >= 3 and REPLICAS in axes_of(BATCH, rules) and REPLICAS not in axes_of(EMBED, rules):
        rules = {**rules, EMBED: (*axes_of(EMBED, rules), REPLICAS)}
    own = tuple(dict.fromkeys((*axes_of(VOCAB, rules), *axes_of(EMBED, rules))))
    return rules if TABLE in rules or not own else {**rules, TABLE: own}


def placed_dims(
    names: Sequence[str | None], shape: Sequence[int], rules: Rules, sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of every dim of a parameter: those of the rules, unless its layers cannot be shared out evenly.

    Then they lie whole, and the axes that were to hold them spread another dim (see `stored_dims`); a pipeline sends
    every stage its layers at the beginning of a step.
    """
    dims = dims_to_axes(names, rules)
    for d, name in enumerate(names):
        if name == LAYERS and shape[d] % prod(sizes.get(axis, 1) for axis in dims[d]):
            return _spread(names, shape, (*dims[:d], (), *dims[d + 1 :]), dims[d], sizes)
    return dims


def stored_dims(
    names: Sequence[str | None], shape: Sequence[int], rules: Rules, sizes: Mapping[str, int], zero: int
) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of every dim of a tensor of the train state, where a ZeRO stage keeps it.

    From stage 1 on the state is also spread over the replicas, in every stage alike, on the first dim that divides:
    `embed`, else the largest. Layers stay whole, because a scan takes them one by one. A tensor that has no such dim
    stays as the rules place it. Rajbhandari et al. 2020, arXiv 1910.02054.
    """
    dims = placed_dims(names, shape, rules, sizes)
    if zero == 0 or sizes.get(REPLICAS, 1) == 1 or REPLICAS not in axes_of(BATCH, rules):
        return dims
    return dims if any(REPLICAS in dim for dim in dims) else _spread(names, shape, dims, (REPLICAS,), sizes)


def _spread(
    names: Sequence[str | None],
    shape: Sequence[int],
    dims: tuple[tuple[str, ...], ...],
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
) -> tuple[tuple[str, ...], ...]:
    """`dims` with the axes added to the first dim that divides: `embed`, else the largest, but no layers."""
    free = (d for d, name in enumerate(names) if name != LAYERS)
    for d in sorted(free, key=lambda d: (names[d] not in (EMBED, TABLE), -shape[d])):
        if shape[d] % prod(sizes.get(axis, 1) for axis in (*dims[d], *axes)) == 0:
            return (*dims[:d], (*dims[d], *axes), *dims[d + 1 :])
    return dims


def table_names(embed: int, tied: bool, shards: int) -> Names:
    """Logical names of an embedding table's dims: of one that is the head too, or that has not the width for so many
    shards, those of a head."""
    return (VOCAB, EMBED) if tied or embed % shards else (None, TABLE)


def kv_copies(heads: int, kv_heads: int, shards: int) -> int:
    """Returns how often each key/value head is repeated so that `shards` can split them: 1 if they divide already.

    Fewer heads than shards are stored whole on each of these and their *weights* repeated for use: repeated keys and
    values would be moved and kept several times. 1 too where the query heads could not follow: that is an error.
    """
    copies = lcm(kv_heads, shards) // kv_heads
    return copies if heads % (kv_heads * copies) == 0 else 1
