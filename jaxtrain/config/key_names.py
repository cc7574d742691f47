"""Names of config keys: all dotted keys, the JSON Schema, and the right key for a wrong one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from jaxtrain.config.provenance import KeyPath, dotted
from jaxtrain.config.schema import Config
from jaxtrain.config.synonyms import SYNONYMS
from jaxtrain.errors import close_matches, did_you_mean, join_words

MAX_LISTED = 12  # keys of a section that a message lists


@functools.cache
def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a config file, for editors; with the keys that only a file may have."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    paths = {"type": "string"}
    schema["properties"] |= {
        "extends": {
            "anyOf": [paths, {"type": "array", "items": paths}],
            "description": "files this one builds on, relative to it; later files and this one win",
        },
        "resolved": {
            "type": "boolean",
            "default": False,
            "description": "the file is complete: `layout` is only a name, nothing is read from its file",
        },
    }
    return schema


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Returns the dotted keys of all values, such as `optimizer.lr` and `data.sources.0.path`."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            key, inner = f"{prefix}{field.alias or name}", _section_type(field.annotation)
            if inner is None or get_origin(field.annotation) is dict:
                yield key
            else:
                yield from walk(inner, f"{key}.0." if get_origin(field.annotation) is tuple else f"{key}.")

    return tuple(walk(Config, ""))


def section_keys(path: KeyPath) -> list[str]:
    """Returns the keys of the section at a path."""
    section: type[BaseModel] = Config
    for part in path:  # indices of lists and names in tables are no fields, and stay in the section
        field = {field.alias or name: field for name, field in section.model_fields.items()}.get(str(part))
        section = (field and _section_type(field.annotation)) or section
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """Returns the section in a type such as `MoeConfig | None` or `tuple[SourceConfig, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_type, get_args(annotation))), None)


def _synonym(name: str) -> str | None:
    return SYNONYMS.get(name.lower().replace("-", "_"))


def _keys_ending_in(name: str) -> list[str]:
    """Returns the keys whose last part this is; `optimizer.lr` for `lr`, not a deeper one of the same name."""
    keys = [key for key in all_keys() if key.rpartition(".")[2] == name]
    return [key for key in keys if key.count(".") == min(other.count(".") for other in keys)]


def find_key(name: str) -> str | None:
    """Returns the dotted key for a key, its last part or another trainer's name; text if there are several."""
    name = name.replace("-", "_")
    keys = _keys_ending_in(name)
    if name in all_keys() or len(keys) == 1:
        return name if name in all_keys() else keys[0]
    ours = _synonym(name.rpartition(".")[2])
    return ours.strip("`") if ours and ours.strip("`") in all_keys() else ours


def unknown_key(path: KeyPath) -> str:
    """Returns the message for a key that does not exist, with the key that was probably meant."""
    name, siblings = str(path[-1]), section_keys(path[:-1])
    if ours := _synonym(name):
        return f"unknown key; jaxtrain calls it {ours}"
    if "." in name and name in all_keys():
        return f"unknown key; write it nested, as {': {'.join(name.split('.'))}: ...{'}' * name.count('.')}"
    if keys := _keys_ending_in(name):
        return f"unknown key here; expected {join_words(keys[:4])}"
    if hint := did_you_mean(name, siblings):
        return f"unknown key{hint}"
    if near := close_matches(name, {key.rpartition(".")[2] for key in all_keys()}, 0.8):
        return f"unknown key (did you mean {join_words(_keys_ending_in(near[0])[:4])}?)"
    if len(path) == 1 or len(siblings) > MAX_LISTED:
        return "unknown key; `jaxtrain schema` prints all"
    return f"unknown key; `{dotted(path[:-1])}` has {join_words(siblings, 'and')}"
