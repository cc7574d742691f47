"""Checks of a mesh and its rules, before JAX starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from jaxtrain.config.checks import divisors
from jaxtrain.config.schema import MeshConfig
from jaxtrain.errors import Problem, did_you_mean, join_words
from jaxtrain.sharding.axes import AXES, shape_text
from jaxtrain.sharding.rules import (
    BATCH,
    CONTEXT,
    EMBED,
    EXPERT,
    INFERRED,
    LAYERS,
    PIPELINE_AXIS,
    SEQUENCE,
    TABLE,
    VOCAB,
    requested_axes,
)

Shape = tuple[int, ...]
Names = tuple[str | None, ...]

# Names that layouts may have rules for even if the model has no such dim.
KNOWN = frozenset(
    (BATCH, SEQUENCE, CONTEXT, EMBED, "heads", "kv_heads", "head_dim", "mlp", VOCAB, TABLE, LAYERS, EXPERT, INFERRED)
)
# Activations of the decoder; no axis may shard two dims of one of them.
ACTIVATIONS: dict[str, Names] = {
    "the residual stream": ("batch", "sequence", None),
    "the queries": ("batch", "context", "heads", None),
    "the keys and values": ("batch", "context", "kv_heads", None),
    "the feed-forward activations": ("batch", "context", "mlp"),
    "the activations of the experts": ("expert", None, "mlp"),
    "the logits": ("batch", "context", "vocab"),
}
WORDS = {
    "batch": "sequences per microbatch (data.global_batch / step.microbatches)",
    "sequence": "tokens per sequence (data.sequence)",
    "context": "tokens per sequence (data.sequence)",
}
LISTED = 24  # tensors that one line names


def check(
    mesh: MeshConfig,
    rules: Mapping[str, Sequence[str]],
    tensors: Mapping[str, tuple[Shape, Names]] | None,
    activations: Mapping[str, int],
    devices: int | None,
) -> list[Problem]:
    """Returns the problems of a mesh and its rules for a model, one for each cause.

    Args:
        mesh: sizes of the axes; one may be -1.
        rules: logical name -> mesh axes.
        tensors: path -> (shape, logical names) of every parameter; None if unknown.
        activations: logical name -> size of activation dims, e.g. `{"batch": 8, "sequence": 1024}`.
        devices: number of devices; None if unknown: then an axis of -1 is not checked.

    Returns:
        Problems with dotted keys, without places.
    """
    sizes, problems = axis_sizes(mesh, devices)
    problems += _dcn(mesh, sizes)
    problems += _rule_names(rules, tensors, activations)
    valid = {name: tuple(a for a in dict.fromkeys(axes) if a in AXES) for name, axes in rules.items()}
    problems += _duplicate_axes(valid, tensors or {}, activations, sizes)
    problems += _indivisible(valid, tensors or {}, activations, sizes)
    problems += _unused_axes(valid, tensors, activations, sizes)
    return problems


def axis_sizes(mesh: MeshConfig, devices: int | None) -> tuple[dict[str, int | None], list[Problem]]:
    """Returns the sizes of all axes (None if unknown), and their problems."""
    given = {axis: int(getattr(mesh, axis)) for axis in AXES}
    free = [axis for axis, size in given.items() if size == -1]
    known: dict[str, int | None] = {axis: None if size == -1 else size for axis, size in given.items()}
    wrong = [axis for axis, size in given.items() if size == 0 or size < -1]
    if wrong:
        return known, [
            Problem("", f"mesh.{a}", f"expected a positive integer, or -1 to infer the size; found {given[a]}")
            for a in wrong
        ]
    if len(free) > 1:
        names = join_words((f"mesh.{axis}" for axis in free), "and")
        message = f"only one axis may be -1 (inferred), but {names} all are; give all but one a size"
        return known, [
            Problem("", f"mesh.{free[-1]}", message.replace("all are", "both are" if len(free) == 2 else "all are"))
        ]
    if devices is None:
        return known, []
    fixed = prod(size for size in given.values() if size != -1)
    if free and devices % fixed == 0:
        return {**known, free[0]: devices // fixed}, []
    if not free and devices == fixed:
        return known, []
    text = shape_text({axis: size for axis, size in given.items() if size != -1}).replace(
        "of 1 device", "a mesh of ones"
    )
    need = f"needs a multiple of {fixed} devices" if free else f"needs {_devices(fixed)}"
    message = f"{text} {need}, and there {'is' if devices == 1 else 'are'} {devices}; {_sizes_that_fit(given, devices)}"
    return known, [Problem("", "mesh", message)]


def _devices(count: int) -> str:
    return f"{count} device{'s' if count != 1 else ''}"


def _sizes_that_fit(given: Mapping[str, int], devices: int) -> str:
    """Returns sizes of single axes that fit the devices, nearest first, or else where to put -1."""
    fixed = prod(size for size in given.values() if size != -1)
    free = -1 in given.values()
    fits = []
    for axis, size in given.items():
        rest = fixed // size
        if size > 1 and devices % rest == 0:
            choices = divisors(devices // rest, size, count=2) if free else [devices // rest]
            fits += [f"mesh.{axis}={choice}" for choice in choices]
    if fits:
        return f"would fit: {join_words(fits[:4])}"
    if free:
        return f"nearest number of devices: {max(1, round(devices / fixed)) * fixed}"
    largest = max(given, key=lambda axis: (given[axis], axis == "data"))
    return f"set mesh.{largest} to -1 and the others to a divisor of {devices}"


def _dcn(mesh: MeshConfig, sizes: Mapping[str, int | None]) -> Iterable[Problem]:
    """Checks that the part of an axis that spans slices divides the axis."""
    for axis, part in mesh.dcn.items():
        if axis not in AXES:
            message = f"unknown axis{did_you_mean(axis, AXES)}; the axes are {join_words(AXES, 'and')}"
            yield Problem("", f"mesh.dcn.{axis}", message)
            continue
        size = sizes[axis]
        if size is not None and size % part:
            message = (
                f"{part} slices do not divide mesh.{axis} {size}; expected e.g. {join_words(divisors(size, part))}"
            )
            yield Problem("", f"mesh.dcn.{axis}", message)


def _model_names(tensors: Mapping[str, tuple[Shape, Names]] | None, activations: Mapping[str, int]) -> set[str]:
    """Returns the logical names that the model has."""
    names = {name for _, dims in (tensors or {}).values() for name in dims if name is not None}
    return names | set(activations)


def _rule_names(
    rules: Mapping[str, Sequence[str]],
    tensors: Mapping[str, tuple[Shape, Names]] | None,
    activations: Mapping[str, int],
) -> Iterable[Problem]:
    """Finds unknown logical names, unknown axes, and axes given twice in one rule."""
    names = _model_names(tensors, activations) | KNOWN
    for name, axes in rules.items():
        if tensors is not None and name not in names:
            hint = did_you_mean(name, sorted(names)) or f"; the names are {join_words(sorted(names), 'and')}"
            yield Problem("", f"rules.{name}", f"no tensor has a dim `{name}`{hint}")
        for axis in dict.fromkeys(axes):
            if axis not in AXES:
                message = f"unknown axis `{axis}`{did_you_mean(axis, AXES)}; the axes are {join_words(AXES, 'and')}"
                yield Problem("", f"rules.{name}", message)
            elif list(axes).count(axis) > 1:
                yield Problem("", f"rules.{name}", f"axis `{axis}` is given twice; expected once")


def _duplicate_axes(
    rules: Mapping[str, tuple[str, ...]],
    tensors: Mapping[str, tuple[Shape, Names]],
    activations: Mapping[str, int],
    sizes: Mapping[str, int | None],
) -> Iterable[Problem]:
    """Finds axes that would shard two dims of one tensor; one problem for each pair of names."""
    tables: dict[str, Names] = {path: names for path, (_, names) in tensors.items()}
    for what, names in ACTIVATIONS.items():
        tables[what] = tuple(n if n in activations or n in _model_names(tensors, {}) else None for n in names)
    found: dict[tuple[str, str, str], list[str]] = {}
    for path, names in tables.items():
        owner: dict[str, tuple[int, str]] = {}
        for dim, (name, axes) in enumerate(zip(names, requested_axes(names, rules))):
            for axis in axes:
                if sizes[axis] == 1:
                    continue
                first, first_name = owner.setdefault(axis, (dim, name or ""))
                if first != dim:
                    low, high = sorted((first_name, name or ""))
                    cause = (axis, low, high)
                    found.setdefault(cause, []).append(f"{path} (dims {first} and {dim})")
    for (axis, first_name, name), paths in found.items():
        who = f"both `{first_name}` and `{name}`" if first_name != name else f"two dims `{name}`"
        message = f"axis `{axis}` would shard {who} of {_listed(paths)}; expected it in one of these rules"
        yield Problem("", f"rules.{name}", message)


def _indivisible(
    rules: Mapping[str, tuple[str, ...]],
    tensors: Mapping[str, tuple[Shape, Names]],
    activations: Mapping[str, int],
    sizes: Mapping[str, int | None],
) -> Iterable[Problem]:
    """Finds dims that the shards do not divide; one problem for each name and size."""
    found: dict[tuple[str, int, tuple[str, ...]], list[str]] = {}
    for name, size in activations.items():
        if (
            name == "context"
            and set(rules.get(name, ())) <= set(rules.get("sequence", ()))
            and "sequence" in activations
        ):
            continue  # reported with the sequence
        found.setdefault((name, size, tuple(rules.get(name, ()))), [])
    for path, (shape, names) in tensors.items():
        for dim, (name, size, axes) in enumerate(zip(names, shape, requested_axes(names, rules))):
            if name is not None:
                found.setdefault((name, size, axes), []).append(f"{path} (dim {dim})")
    for (name, size, axes), paths in found.items():
        # An axis of unknown size only multiplies the shards: if the others do not divide the dim, it does not either.
        counts = {axis: sizes[axis] or 1 for axis in axes if sizes[axis] != 1}
        shards = prod(counts.values())
        if size % shards == 0 or (
            name == LAYERS and axes == (PIPELINE_AXIS,)
        ):  # stages may hold unequal numbers of layers
            continue
        split = " x ".join(f"{axis} {count}" for axis, count in counts.items() if count > 1)
        what = WORDS.get(name, f"of dim `{name}`") if not paths else f"of dim `{name}` in {_listed(paths)}"
        above = -(-size // shards) * shards
        nearest = join_words([above - shards, above] if above > shards else [above])
        message = f"{size} {what} cannot be split into {shards} ({split})"
        sizes_that_fit = f"`{name}` of {nearest}" if paths else nearest
        fix = f"expected {sizes_that_fit}, or {join_words(divisors(size, shards))} shards"
        yield Problem("", f"rules.{name}", f"{message}; {fix}")


def _unused_axes(
    rules: Mapping[str, Sequence[str]],
    tensors: Mapping[str, tuple[Shape, Names]] | None,
    activations: Mapping[str, int],
    sizes: Mapping[str, int | None],
) -> Iterable[Problem]:
    """Finds axes with several devices that no rule uses: the devices would all compute the same."""
    names = set(rules) if tensors is None else _model_names(tensors, activations)
    used = {axis for name, axes in rules.items() if name in names for axis in axes}
    for axis, size in sizes.items():
        if size is not None and size > 1 and axis not in used:
            message = f"{size} devices, but no rule of the layout uses the axis: they would repeat the same work"
            yield Problem("", f"mesh.{axis}", f"{message}; expected 1, a rule with `{axis}`, or another layout")


def _listed(paths: Sequence[str]) -> str:
    """Lists the tensors, at most `LISTED` of them."""
    if len(paths) <= LISTED:
        return join_words(paths, "and")
    return f"{', '.join(paths[:LISTED])} and {len(paths) - LISTED} more"
