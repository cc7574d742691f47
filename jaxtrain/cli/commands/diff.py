"""`jaxtrain diff A B`: compares the configs of two files or runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.config.show import diff, text
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import escape_unprintable


def run(args: argparse.Namespace) -> int:
    """Prints the keys whose values differ."""
    print("\n".join(diff_lines(args.a, args.b)) or "no difference")
    return 0


def diff_lines(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[str]:
    """Lines `key: value in a -> value in b  # source in a -> source in b` for keys whose values differ.

    Args:
        a: a config file or a run directory.
        b: the other.

    Raises:
        ConfigError: one of them does not load.
    """

    def read(path: str | os.PathLike[str]) -> tuple[Config, dict[str, str]]:
        inside = os.path.join(path, "config.yaml")
        return resolve(inside if os.path.isdir(path) else path, paths=False, checks=())

    (left, left_sources), (right, right_sources) = read(a), read(b)
    lines = []
    for key, (old, new) in diff(left, right).items():
        sources = f"{left_sources.get(key, 'absent')} -> {right_sources.get(key, 'absent')}"
        lines.append(f"{key}: {_value(key, old, left_sources)} -> {_value(key, new, right_sources)}  # {sources}")
    return [escape_unprintable(line) for line in lines]


def _value(key: str, value: Any, provenance: Mapping[str, str]) -> str:
    return text(value) if key in provenance else "absent"
