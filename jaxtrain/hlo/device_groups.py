"""Device groups of collectives, and the mesh axes along which their members differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:,\s*device_ids=\((.*?\)?)\))?\s*\{(.*?)\}")
_AXIS = re.compile(r"'?([A-Za-z_][\w.]*)'?(?::\((\d+)\)(\d+))?")


@lru_cache(maxsize=256)
def replica_groups(text: str, devices: int) -> Groups:
    """Parses the text after `replica_groups=`.

    Args:
        text: `{{0,1},{2,3}}`; `{}` for all devices; `[8,8]<=[64]` and `[4,2]<=[2,4]T(1,0)`, rows of a transposed
            iota; `mesh['a'=2,'b'=4] {'b'}`, the devices of a mesh along some of its axes (`'b':(2)2` is a part of
            one), with `device_ids=([2,4]T(1,0))` if the mesh does not count in order.
        devices: number of devices of the program.

    Raises:
        ValueError: another form.
    """
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        shape, _, order = text.partition("<=")
        return _as_groups(_iota(order).reshape(-1, _numbers(shape.strip("[]"))[-1]))
    if text.startswith("{"):
        groups = tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]+)\}", text))
        return groups or (tuple(range(devices)),)
    raise ValueError(f"HLO: replica groups of unknown form `{text[:60]}`")


def source_target_pairs(attributes: str) -> Groups:
    """(source, target) of every move of a collective-permute; a device that sends to itself is left out."""
    match = re.search(r"source_target_pairs=\{((?:\{[^}]*\},?\s*)*)\}", attributes)
    pairs = (tuple(_numbers(pair)) for pair in re.findall(r"\{([^}]*)\}", match[1] if match else ""))
    return tuple(pair for pair in pairs if len(set(pair)) == 2)


def replica_groups_text(attributes: str) -> str:
    """Text after `replica_groups=` in an instruction's attributes; `{}` if absent."""
    forms = r"mesh\[[^{]*\{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[^}]*\},?\s*)*\}"
    match = re.search(rf"\breplica_groups=({forms})", attributes)
    if not match and "replica_groups=" in attributes:
        raise ValueError(f"HLO: replica groups of unknown form in `{attributes[:120]}`")
    return match[1] if match else "{}"


def group_axes(groups: Iterable[Sequence[int]], sizes: Mapping[str, int]) -> tuple[tuple[str, ...], bool]:
    """Axes along which members of a group differ, and whether each group is the full product of these axes.

    Args:
        groups: device numbers; a device's number is its index in `Mesh.devices.flat`.
        sizes: size of every mesh axis, in order, such as `Mesh.shape`.
    """
    return _group_axes(tuple(map(tuple, groups)), tuple(sizes.items()))


@lru_cache(maxsize=256)  # a program has few different groups, each of all devices
def _group_axes(groups: Groups, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], bool]:
    if not groups:
        return (), False
    lengths, counts = [size for _, size in sizes], [len(group) for group in groups]
    coordinates = np.unravel_index(np.concatenate(groups), lengths)
    first = np.unravel_index(np.repeat([group[0] for group in groups], counts), lengths)
    differ = {name: size for (name, size), a, b in zip(sizes, coordinates, first) if np.any(a != b)}
    return tuple(differ), set(counts) == {prod(differ.values())}


def split_dcn_axes(sizes: Mapping[str, int], dcn: Mapping[str, int]) -> dict[str, int]:
    """Splits every axis into the factor that spans slices (`AXIS dcn`) and the rest, in order."""
    factors = ({f"{axis} dcn": dcn.get(axis, 1), axis: size // dcn.get(axis, 1)} for axis, size in sizes.items())
    return {name: size for pair in factors for name, size in pair.items()}


def expand_slice_groups(groups: Groups, sizes: Mapping[str, int], dcn: Mapping[str, int]) -> Groups:
    """Groups of all devices, from those of a program of several TPU slices, which numbers the devices of one slice.

    Every slice runs the same program; a `send` leaves the slice.

    Args:
        groups: device numbers within a slice, or of all devices already.
        sizes: size of every mesh axis, in order.
        dcn: factor of each axis that spans slices, as in `mesh.dcn`; others are 1.
    """
    devices = prod(sizes.values())
    per_slice = devices // prod(dcn.values())
    if per_slice == devices or any(device >= per_slice for group in groups for device in group):
        return groups
    slice_sizes = split_dcn_axes({axis: size // dcn.get(axis, 1) for axis, size in sizes.items()}, {})
    return expand_groups(groups, slice_sizes, split_dcn_axes(sizes, dcn))


def expand_groups(groups: Groups, small: Mapping[str, int], large: Mapping[str, int]) -> Groups:
    """Groups of a collective on a large mesh, from those of a program that was compiled for a smaller mesh.

    A group that joins all positions of an axis joins all of the larger axis; a group at one position of an axis is
    repeated at each position.

    Args:
        groups: device numbers in the smaller mesh.
        small: size of every axis of the smaller mesh, in order.
        large: the same for the larger mesh; same names.

    Raises:
        ValueError: groups that join only some positions of an enlarged axis, or differ from position to position.
    """
    return groups if small == large else _expand_groups(groups, tuple(small.items()), tuple(large.values()))


@lru_cache(maxsize=256)
def _expand_groups(groups: Groups, small: tuple[tuple[str, int], ...], large: tuple[int, ...]) -> Groups:
    names, sizes = [name for name, _ in small], [size for _, size in small]
    enlarged = [axis for axis, size in enumerate(sizes) if size != large[axis]]
    joined = [axis for axis in enlarged if names[axis] in group_axes(groups, dict(small))[0]]
    repeated = [axis for axis in enlarged if axis not in joined]
    numbers = np.arange(prod(large)).reshape(large)
    strides = [prod(large[axis + 1 :]) for axis in range(len(large))]

    def offsets(axes: Sequence[int]) -> list[int]:
        return numbers[tuple(slice(None) if axis in axes else 0 for axis in range(len(large)))].ravel().tolist()

    members, copies = offsets(joined), offsets(repeated)
    out: list[tuple[int, ...]] = []
    for group in groups:
        coordinates = np.stack(np.unravel_index(group, sizes), axis=-1)
        if coordinates[:, repeated].any():
            continue  # a copy of the group at position 0
        coordinates[:, joined] = 0
        origins = dict.fromkeys((coordinates @ strides).tolist())
        if len(origins) * prod(sizes[axis] for axis in joined) != len(group):
            raise ValueError(f"HLO: groups join a part of {'+'.join(names[axis] for axis in joined)}")
        whole = [origin + offset for origin in origins for offset in members]
        out += [tuple(member + offset for member in whole) for offset in copies]
    if len(out) * prod(sizes[axis] for axis in repeated) != len(groups) * len(copies):
        raise ValueError(f"HLO: groups differ along {'+'.join(names[axis] for axis in repeated)}")
    return tuple(out)


def dcn_groups(sizes: Mapping[str, int], dcn: Mapping[str, int]) -> Groups:
    """Groups of the devices that differ only in the factors that span slices.

    Args:
        sizes: size of every mesh axis, in order.
        dcn: factor of each axis that spans slices, as in `mesh.dcn`; others are 1.
    """
    lengths = list(split_dcn_axes(sizes, dcn).values())
    return _groups_along(np.arange(prod(lengths)).reshape(lengths), range(0, len(lengths), 2))


def _groups_along(devices: np.ndarray, joined: Sequence[int]) -> Groups:
    """Groups of a mesh of devices along the joined dims."""
    others = [dim for dim in range(devices.ndim) if dim not in joined]
    return _as_groups(devices.transpose(*others, *joined).reshape(-1, prod(devices.shape[dim] for dim in joined)))


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(map(tuple, rows.tolist()))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _iota(text: str) -> np.ndarray:
    """Parses `[2,4]T(1,0)`, an iota of the shape with its dims transposed, or a list of numbers."""
    match = _IOTA.fullmatch(text.strip())
    if not match:
        return np.array(_numbers(text))
    dims = _numbers(match[1])
    return np.arange(prod(dims)).reshape(dims).transpose(_numbers(match[2]) if match[2] else None).ravel()


def _mesh_groups(text: str) -> Groups:
    """Groups of a mesh along some axes. An axis of which only a factor is joined is split into its factors."""
    match = _MESH.match(text)
    if not match:
        raise ValueError(f"HLO: replica groups of unknown form `{text[:60]}`")
    sizes = {name: int(size) for name, size in re.findall(r"'?([A-Za-z_][\w.]*)'?=(\d+)", match[1])}
    devices = _iota(match[2]) if match[2] else np.arange(prod(sizes.values()))
    edges: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    chosen: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for name, before, part in _AXIS.findall(match[3]):
        start, size = (int(before), int(part)) if part else (1, sizes[name])
        edges[name] |= {start, start * size}
        chosen[name].append((start, start * size))
    lengths, joined = [], []
    for name, cuts in edges.items():
        for start, end in zip(sorted(cuts), sorted(cuts)[1:]):
            if any(low <= start and end <= high for low, high in chosen[name]):
                joined.append(len(lengths))
            lengths.append(end // start)
    return _groups_along(devices.reshape(lengths), joined)
