"""Device groups of collectives, and the mesh axes along which they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from operator import mul

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:,\s*device_ids=\((.*?\)?)\))?\s*\{(.*?)\}")
_AXIS = re.compile(r"'?([A-Za-z_][\w.]*)'?(?::\((\d+)\)(\d+))?")


@lru_cache(maxsize=256)
def replica_groups(text: str, devices: int) -> Groups:
    """The groups of the text after `replica_groups=`.

    Args:
        text: `{{0,1},{2,3}}`; `{}`, all devices; `[8,8]<=[64]` and `[4,2]<=[2,4]T(1,0)`, rows of a transposed
            count; `mesh['a'=2,'b'=4] {'b'}`, the devices of a mesh along some of its axes (`'b':(2)2` is a part of
            one), with `device_ids=([2,4]T(1,0))` where the mesh does not count in order.
        devices: of the program.

    Raises:
        ValueError: another form.
    """
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        shape, _, count = text.partition("<=")
        ids, size = _iota(count), _numbers(shape.strip("[]"))[-1]
        return tuple(tuple(ids[at : at + size]) for at in range(0, len(ids), size))
    if text.startswith("{"):
        listed = tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]+)\}", text))
        return listed or (tuple(range(devices)),)
    raise ValueError(f"HLO: replica groups of unknown form `{text[:60]}`")


def pairs(attributes: str) -> Groups:
    """(source, target) of every move of a collective-permute; a device that keeps its own is left out."""
    found = re.search(r"source_target_pairs=\{((?:\{[^}]*\},?\s*)*)\}", attributes)
    listed = (tuple(_numbers(pair)) for pair in re.findall(r"\{([^}]*)\}", found[1] if found else ""))
    return tuple(pair for pair in listed if len(set(pair)) == 2)


def groups_text(attributes: str) -> str:
    """The text after `replica_groups=` in an instruction's attributes; `{}` where there is none."""
    forms = r"mesh\[[^{]*\{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[^}]*\},?\s*)*\}"
    found = re.search(rf"\breplica_groups=({forms})", attributes)
    if not found and "replica_groups=" in attributes:
        raise ValueError(f"HLO: replica groups of unknown form in `{attributes[:120]}`")
    return found[1] if found else "{}"


def axes_of(groups: Iterable[Sequence[int]], sizes: Mapping[str, int]) -> tuple[tuple[str, ...], bool]:
    """Axes along which members of a group differ, and whether the groups are the whole product of these axes.

    Args:
        groups: device numbers; a device's number is its place in the flat mesh, as in `Mesh.devices.flat`.
        sizes: of all mesh axes in order, such as `Mesh.shape`.
    """
    return _axes_of(tuple(map(tuple, groups)), tuple(sizes.items()))


@lru_cache(maxsize=256)  # a program has few different groups, each of all devices
def _axes_of(groups: Groups, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], bool]:
    names, lengths = [name for name, _ in sizes], [size for _, size in sizes]
    differ: set[str] = set()
    counts = set()
    for group in groups:
        places = [_place(device, lengths) for device in group]
        differ |= {name for name, along in zip(names, zip(*places)) if len(set(along)) > 1}
        counts.add(len(group))
    axes = tuple(name for name in names if name in differ)
    return axes, counts == {prod(size for name, size in sizes if name in differ)}


def split(sizes: Mapping[str, int], across: Mapping[str, int]) -> dict[str, int]:
    """Sizes of all axes, in order, with those that span slices cut in the part that does and the rest."""
    parts = ({f"{axis} across": across.get(axis, 1), axis: size // across.get(axis, 1)} for axis, size in sizes.items())
    return {name: size for part in parts for name, size in part.items()}


def of_slices(groups: Groups, sizes: Mapping[str, int], across: Mapping[str, int]) -> Groups:
    """Groups of all devices where a program lists those of one slice, which it counts by themselves.

    So does that of several TPU slices: each runs the same, and what leaves a slice is a `send`.

    Args:
        sizes, across: as in `spanning`.
    """
    all_devices = prod(sizes.values())
    inside = all_devices // prod(across.values())
    if inside == all_devices or any(device >= inside for group in groups for device in group):
        return groups
    return grown(
        groups, split({axis: size // across.get(axis, 1) for axis, size in sizes.items()}, {}), split(sizes, across)
    )


def grown(groups: Groups, pod: Mapping[str, int], sizes: Mapping[str, int]) -> Groups:
    """The groups that a program's collective joins on a mesh of which it was compiled for a smaller one.

    A group that joins one place of an axis is there once for each place; one that joins all places joins them all.

    Args:
        groups: device numbers in the smaller mesh.
        pod: sizes of its axes, all of them in order.
        sizes: of the axes of the larger one; the same names.

    Raises:
        ValueError: groups that join some places of an axis that is larger, or not the same devices at each of them.
    """
    if pod == sizes:
        return groups
    return _grown(groups, tuple(pod.items()), tuple(sizes.values()))


@lru_cache(maxsize=256)
def _grown(groups: Groups, pod: tuple[tuple[str, int], ...], lengths: tuple[int, ...]) -> Groups:
    names, small = [name for name, _ in pod], [size for _, size in pod]
    strides = [prod(lengths[at + 1 :]) for at in range(len(lengths))]
    larger = [at for at in range(len(lengths)) if small[at] != lengths[at]]
    joined = [at for at in larger if names[at] in axes_of(groups, dict(pod))[0]]
    apart = [at for at in larger if at not in joined]

    def offsets(axes: Sequence[int]) -> list[int]:
        return [sum(map(mul, at, (strides[a] for a in axes))) for at in product(*(range(lengths[a]) for a in axes))]

    inside, between = offsets(joined), offsets(apart)
    out: list[tuple[int, ...]] = []
    for group in groups:
        places = [_place(device, small) for device in group]
        if any(place[at] for place in places for at in apart):
            continue  # the same as the one at their first place
        origins = dict.fromkeys(
            sum(0 if at in joined else index * strides[at] for at, index in enumerate(place)) for place in places
        )
        if len(origins) * prod(small[at] for at in joined) != len(group):
            raise ValueError(f"HLO: groups join a part of {'+'.join(names[at] for at in joined)}")
        members = [origin + offset for origin in origins for offset in inside]
        out += [tuple(member + offset for member in members) for offset in between]
    if len(out) * prod(small[at] for at in apart) != len(groups) * len(between):
        raise ValueError(f"HLO: groups are not the same all along {'+'.join(names[at] for at in apart)}")
    return tuple(out)


def spanning(sizes: Mapping[str, int], across: Mapping[str, int]) -> Groups:
    """Groups of the devices that differ only in the outer factor of axes which span slices.

    Args:
        sizes: of all mesh axes in order.
        across: that factor of each axis, as in `mesh.dcn`; others are 1.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    inner = [size // across.get(axis, 1) for axis, size in sizes.items()]
    for index in range(prod(sizes.values())):
        place = _place(index, list(sizes.values()))
        found.setdefault(tuple(at % size for at, size in zip(place, inner)), []).append(index)
    return tuple(map(tuple, found.values()))


def _place(index: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a flat index."""
    place = []
    for length in reversed(lengths):
        index, at = divmod(index, length)
        place.append(at)
    return tuple(reversed(place))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _iota(text: str) -> list[int]:
    """`[2,4]T(1,0)`: counting in rows of the first shape, read in the transposed order."""
    found = _IOTA.fullmatch(text.strip())
    if not found:
        return _numbers(text)
    dims = _numbers(found[1])
    order = _numbers(found[2]) if found[2] else list(range(len(dims)))
    strides = [prod(dims[at + 1 :]) for at in range(len(dims))]
    return [sum(i * strides[dim] for i, dim in zip(at, order)) for at in product(*(range(dims[dim]) for dim in order))]


def _mesh_groups(text: str) -> Groups:
    """Groups of a mesh along some axes; each axis is cut in three, so that a part of it can be chosen."""
    found = _MESH.match(text)
    if not found:
        raise ValueError(f"HLO: replica groups of unknown form `{text[:60]}`")
    sizes = {name: int(size) for name, size in re.findall(r"'?([A-Za-z_][\w.]*)'?=(\d+)", found[1])}
    ids = _iota(found[2]) if found[2] else list(range(prod(sizes.values())))
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    chosen: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for name, before, part in _AXIS.findall(found[3]):
        start, size = (int(before), int(part)) if part else (1, sizes[name])
        cuts[name] |= {start, start * size}
        chosen[name].append((start, start * size))
    lengths, joined = [], []
    for name, edges in cuts.items():
        for start, end in zip(sorted(edges), sorted(edges)[1:]):
            lengths.append(end // start)
            joined.append(any(low <= start and end <= high for low, high in chosen[name]))
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, device in enumerate(ids):
        place = _place(index, lengths)
        groups.setdefault(tuple(at for at, join in zip(place, joined) if not join), []).append(device)
    return tuple(map(tuple, groups.values()))
