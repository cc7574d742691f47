"""Nested dicts of arrays as flat dicts by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Path = tuple[Any, ...]
Flat = dict[Path, Any]


def flatten(tree: Mapping[Any, Any], prefix: Path = ()) -> Flat:
    """Returns {path: leaf} in the order of JAX: sorted by key."""
    found: Flat = {}
    for key in sorted(tree, key=lambda key: (str(type(key)), key)):
        value = tree[key]
        found |= flatten(value, (*prefix, key)) if isinstance(value, Mapping) else {(*prefix, key): value}
    return found


def nest(flat: Mapping[Path, Any]) -> dict[Any, Any]:
    """Reverses `flatten`."""
    tree: dict[Any, Any] = {}
    for path, value in flat.items():
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return tree


def name(path: Path) -> str:
    """Returns a path as text, such as `params.embed.table`."""
    return ".".join(map(str, path))
