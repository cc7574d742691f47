"""Paths of arrays in nested dicts: flax's functions, with types that say what islands give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from flax import traverse_util

Path = tuple[Any, ...]
Flat = dict[Path, Any]

flatten_dict = cast("Callable[[Mapping[Any, Any]], Flat]", traverse_util.flatten_dict)
unflatten_dict = cast("Callable[[Mapping[Path, Any]], dict[Any, Any]]", traverse_util.unflatten_dict)


def name(path: Path) -> str:
    """Returns a path as text, such as `params.embed.table`."""
    return ".".join(map(str, path))
