"""Configs as text from Python: the resolved values with their sources, differences, the schema. Imports no JAX."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.config.key_names import json_schema
from jaxtrain.config.run_dir import saved_config
from jaxtrain.config.schema import Config
from jaxtrain.config.show import diff as config_differences
from jaxtrain.config.show import flatten, show, text
from jaxtrain.core.resolve import ConfigSource, load_with_sources
from jaxtrain.errors import escape_unprintable
from jaxtrain.io import html

ABSENT = "absent"


@dataclass(frozen=True)
class ResolvedConfig:
    """A complete config. As text it has a line for each key: `key: value  # source`.

    Attributes:
        config: the values.
        sources: dotted key -> `default`, `FILE:LINE`, `layout NAME`, `command line` or `Config`.
        notes: a line for each value that is not used as it is written.
    """

    config: Config
    sources: Mapping[str, str]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(show(self.config, self.sources))

    def _repr_html_(self) -> str:
        values = flatten(self.config)
        rows = [(key, text(value), self.sources.get(key, "default")) for key, value in values.items()]
        return html.table(("key", "value", "source"), rows, "; ".join(self.notes))


class Difference(NamedTuple):
    """A key whose values differ. A key that one of the configs lacks has there the value None, source `absent`."""

    key: str
    a: Any
    b: Any
    source_a: str
    source_b: str

    def __str__(self) -> str:
        values = [
            ABSENT if source == ABSENT else text(value)
            for value, source in ((self.a, self.source_a), (self.b, self.source_b))
        ]
        line = f"{self.key}: {values[0]} -> {values[1]}  # {self.source_a} -> {self.source_b}"
        return escape_unprintable(line)


def show_config(config: ConfigSource, *overrides: str, **keys: Any) -> ResolvedConfig:
    """Resolves a config, with the source of each value: `print(jaxtrain.show_config("quickstart", layout="fsdp"))`.

    Args:
        config: see `Trainer`; its data need not exist.
        overrides: `key=value` texts.
        keys: sections or keys of the config.

    Raises:
        ConfigError: has every problem, one line each.
    """
    notes: list[str] = []
    loaded, sources = load_with_sources(config, *overrides, paths=False, notes=notes, **keys)
    return ResolvedConfig(loaded, sources, tuple(notes))


def diff(a: ConfigSource, b: ConfigSource) -> list[Difference]:
    """Compares two configs, or the configs of two runs.

    Args:
        a: see `Trainer`, or the folder of a run.
        b: the other.

    Returns:
        the keys whose values differ, in the order of the config.

    Raises:
        ConfigError: one of them does not load.
    """
    (left, left_sources), (right, right_sources) = _read(a), _read(b)
    left_keys, right_keys = flatten(left), flatten(right)

    def origin(key: str, keys: Mapping[str, Any], sources: Mapping[str, str]) -> str:
        return sources.get(key, "default") if key in keys else ABSENT

    return [
        Difference(key, old, new, origin(key, left_keys, left_sources), origin(key, right_keys, right_sources))
        for key, (old, new) in config_differences(left, right).items()
    ]


def config_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a config, which editors complete and check YAML files with."""
    return json_schema()


def _read(source: ConfigSource) -> tuple[Config, dict[str, str]]:
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
        source = saved_config(Path(source))
    return load_with_sources(source, paths=False, checks=())
