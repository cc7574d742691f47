"""A config as text: flat, as YAML that loads again, and as differences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from jaxtrain.config.schema import Config
from jaxtrain.config.yaml_reader import FLOAT, INT, TAG
from jaxtrain.errors import escape_unprintable


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        """Escapes line ends and control characters, which needs double quotes."""
        return self.represent_scalar(f"{TAG}str", data, None if data.isprintable() else '"')

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        """Writes lists of scalars on one line."""
        nested = any(isinstance(item, (dict, list, tuple)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style if nested else True)


_Dumper.add_representer(str, _Dumper.represent_str)
for _kind, _pattern in (("float", FLOAT), ("int", INT)):
    _whole = re.compile(rf"^(?:{_pattern.pattern})$", re.ASCII)
    _Dumper.add_implicit_resolver(TAG + _kind, _whole, list("-+.0123456789"))


def as_dict(config: Config) -> dict[str, Any]:
    """Returns plain dicts, lists and scalars, without the keys that a user's own model or data does not read."""
    return config.model_dump(mode="json")


def dump_yaml(config: Config) -> str:
    """Returns the resolved config as YAML. It loads to an equal Config without the files it came from."""
    header = "# The resolved config of a run: complete, with the content of the layout.\n"
    values = {"resolved": True, **as_dict(config)}
    return header + yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def flatten(config: Config) -> dict[str, Any]:
    """Returns dotted key -> value, of all sections, tables and lists of sections (`data.sources.0.path`)."""
    flat: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, child in value.items():
                walk(child, f"{key}.{name}" if key else str(name))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
            for index, child in enumerate(value):
                walk(child, f"{key}.{index}")
        else:
            flat[key] = value

    walk(as_dict(config), "")
    return flat


def diff(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Returns dotted key -> (old value, new value) of the differences; None for a key that one config lacks."""
    left, right = flatten(old), flatten(new)
    keys = [*left, *(key for key in right if key not in left)]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def show(config: Config, provenance: Mapping[str, str]) -> list[str]:
    """Returns one line for each key, in columns: `key: value  # origin`."""
    left = [f"{key}: {text(value)}" for key, value in flatten(config).items()]
    width = min(max(map(len, left), default=0), 60)
    origins = [provenance.get(key, "default") for key in flatten(config)]
    return [escape_unprintable(f"{line:<{width}}  # {origin}") for line, origin in zip(left, origins)]


def text(value: Any) -> str:
    """Returns a value in one line of YAML."""
    dumped = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True)
    return escape_unprintable(dumped.removesuffix("\n").removesuffix("\n...").strip())
