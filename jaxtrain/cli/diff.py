"""Two configs side by side, with where their values came from. No JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.config.show import diff, text
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import clean


def diff_lines(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[str]:
    """What differs between two configs: `key: a -> b  # place in a -> place in b`.

    Args:
        a: a config file, or the folder of a run.
        b: the other.

    Raises:
        ConfigError: one of them does not load.
    """

    def read(path: str | os.PathLike[str]) -> tuple[Config, dict[str, str]]:
        inside = os.path.join(path, "config.yaml")
        return resolve(inside if os.path.isdir(path) else path, paths=False)

    (left, left_from), (right, right_from) = read(a), read(b)
    lines = []
    for key, (old, new) in diff(left, right).items():
        places = f"{left_from.get(key, 'absent')} -> {right_from.get(key, 'absent')}"
        lines.append(f"{key}: {_value(key, old, left_from)} -> {_value(key, new, right_from)}  # {places}")
    return [clean(line) for line in lines]


def _value(key: str, value: Any, provenance: Mapping[str, str]) -> str:
    return text(value) if key in provenance else "absent"
