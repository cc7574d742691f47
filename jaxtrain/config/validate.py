"""The merged tree to a `Config`, with every problem in plain words."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.checks import cross_problems, path_problems
from jaxtrain.config.field_types import LARGEST
from jaxtrain.config.provenance import Node, Path, deepest, dotted, find, plain
from jaxtrain.config.schema import Config
from jaxtrain.config.synonyms import SYNONYMS
from jaxtrain.errors import MAX_VALUE_LENGTH, Problem, close_matches, did_you_mean, format_value, join_words

MOST_KEYS = 12  # of a section, in a message
REPAIRS = 8  # rounds of dropping what is wrong, so that the rest can be checked too


def validate(tree: Node, problems: list[Problem], paths: bool = True) -> tuple[Config, set[Path]]:
    """A Config from the tree. What is wrong is noted, and dropped so that the rest is checked as well.

    Args:
        tree: the merged levels.
        problems: problems are appended here; if any are, the Config is only good for further checks.
        paths: whether the files that the config reads must be there.

    Returns:
        the Config, and the paths that were dropped from it.
    """
    values = plain(tree)
    dropped: set[Path] = set()
    for _ in range(REPAIRS):
        try:
            config = Config.model_validate(values)
        except ValidationError as error:
            _note(error, tree, values, problems, dropped)
            continue
        found = [*cross_problems(config), *(path_problems(config) if paths else ())]
        problems += [_placed(one, tree) for one in found if not _touches(one.keys, dropped)]
        return config, dropped
    return Config(), dropped | {()}


def _note(
    error: ValidationError, tree: Node, values: dict[str, Any], problems: list[Problem], dropped: set[Path]
) -> None:
    """Notes each error of pydantic once for its key, and drops that key from `values`."""
    seen: set[Path] = set()
    read = {(problem.where, problem.key) for problem in problems}
    for detail in error.errors(include_url=False, include_context=False):
        location = tuple(detail["loc"])
        location = location[:-2] if location[-1:] == ("[key]",) else location  # of a bad key the whole is shown
        node, path = deepest(tree, location)
        if path in seen or not path:
            if not path and () not in seen:  # no key is to blame: nothing to drop but everything
                problems.append(
                    Problem(tree.where, "", f"expected a section of keys, found {format_value(plain(tree))}")
                )
                values.clear()
                seen.add(())
            continue
        seen.add(path)
        if (node.where, dotted(path)) not in read:  # else the reader has said what is wrong
            problems.append(Problem(node.where, _key(path), _message(detail, path, plain(node))))
        dropped.add(_drop(values, path))


def _drop(values: dict[str, Any], path: Path) -> Path:
    """Removes a key, or where it is the item of a list, the list. Returns what was removed."""
    parents: list[Any] = [values]
    for part in path[:-1]:
        container = parents[-1]
        inside = container.get(str(part)) if isinstance(container, dict) else container[int(part)]
        if not isinstance(inside, (dict, list)):  # dropped before, with a parent
            return path
        parents.append(inside)
    for depth in range(len(path) - 1, -1, -1):
        if isinstance(parents[depth], dict):
            parents[depth].pop(str(path[depth]), None)
            return path[: depth + 1]
    return path


def _key(path: Path) -> str:
    """The dotted key, with overlong parts cut."""
    return ".".join(
        part if len(part) <= MAX_VALUE_LENGTH else part[:MAX_VALUE_LENGTH] + "..." for part in map(str, path)
    )


def _message(detail: Mapping[str, Any], path: Path, value: Any) -> str:
    """One plain sentence for one pydantic error."""
    if detail["type"] == "extra_forbidden":
        return unknown_key(path)
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    schema = schema_at(path)
    words = describe(schema)
    if detail["type"] == "less_than_equal" and "to" not in words.split():
        words += f" and at most {detail['msg'].rpartition(' ')[2]}"
    message = f"expected {words}; found {format_value(value)}"
    choices = [choice for part in _variants(schema) for choice in part.get("enum", ())]
    return message + (did_you_mean(value, choices) if isinstance(value, str) else "")


def unknown_key(path: Path) -> str:
    """Returns the message for a key that does not exist: our name for it, a close sibling, or where it lives."""
    name, parent = str(path[-1]), schema_at(path[:-1])
    siblings = list(parent.get("properties", {}))
    if ours := SYNONYMS.get(name.lower().replace("-", "_")):
        return f"unknown key; jaxtrain calls it {ours}"
    if "." in name and name in all_keys():
        return f"unknown key; write it nested, as {': {'.join(name.split('.'))}: ...{'}' * name.count('.')}"
    if close_matches(name, siblings, 0.75):
        return f"unknown key{did_you_mean(name, siblings)}"
    homes = [key for key in all_keys() if key.rpartition(".")[2] == name]
    if homes:
        return f"unknown key here; `{name}` lives at {join_words(homes[:4])}"
    if close_matches(name, siblings):
        return f"unknown key{did_you_mean(name, siblings)}"
    near = close_matches(name, {key.rpartition(".")[2] for key in all_keys()}, 0.8)
    homes = [key for key in all_keys() if near and key.rpartition(".")[2] == near[0]]
    if homes:
        return f"unknown key (did you mean {join_words(homes[:4])}?)"
    if len(path) == 1 or not siblings or len(siblings) > MOST_KEYS:
        return "unknown key; `jaxtrain schema` prints all"
    return f"unknown key; `{_key(path[:-1])}` has {join_words(siblings, 'and')}"


@functools.cache
def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, for editors; the keys only a file may have are included."""
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
    """Returns the dotted keys of a config, sections' own names left out; items of lists as `data.sources.0.path`."""

    def walk(schema: Mapping[str, Any], prefix: str) -> list[str]:
        keys: list[str] = []
        for name, part in schema.get("properties", {}).items():
            part, path = _follow(part), f"{prefix}{name}"
            item = _follow(part.get("items", {}))
            if "properties" in part:
                keys += walk(part, f"{path}.")
            elif "properties" in item:
                keys += walk(item, f"{path}.0.")
            else:
                keys.append(path)
        return keys

    return tuple(key for key in walk(json_schema(), "") if key not in ("extends", "resolved"))


def _follow(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind a `$ref`, or behind the one that may also be null."""
    parts = [part for part in schema.get("anyOf", ()) if part.get("type") != "null"]
    if len(parts) == 1 and "$ref" in parts[0]:
        schema = parts[0]
    if "$ref" in schema:
        return json_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema


def schema_at(path: Path) -> Mapping[str, Any]:
    """The JSON Schema of the value at a path; {} where anything goes."""
    schema: Mapping[str, Any] = json_schema()
    for part in path:
        found: Any = schema.get("properties", {}).get(str(part))
        if found is None and str(part).isdecimal():
            found = next((v["items"] for v in _variants(schema) if "items" in v), None)
            found = found or dict(enumerate(schema.get("prefixItems", ()))).get(int(part))
        if found is None:
            found = schema.get("additionalProperties")
        if not isinstance(found, dict):
            return {}
        variants = found.get("anyOf", ())
        schema = {**_follow(found), "nullable": True} if {"type": "null"} in variants else _follow(found)
    return schema


def _variants(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a schema, null left out."""
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    return [_follow(part) for part in parts]


def describe(schema: Mapping[str, Any]) -> str:
    """Describes in words what a value should be."""
    words = [_describe(part) for part in _variants(schema)]
    if len(words) > 1:
        words = [word.partition(" (")[0] for word in words]
    null = schema.get("nullable") or {"type": "null"} in schema.get("anyOf", ())
    return join_words([*words, "null"] if null else words)


def _describe(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {join_words(schema['enum'])}" if len(schema["enum"]) > 1 else str(schema["enum"][0])
    if "pattern" in schema:
        return "a name of letters, digits, `_`, `.` and `-`, that starts with a letter or digit"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _limits(schema)
    if kind == "array":
        items = "".join({_plural(part) for part in _variants(schema.get("items", {}))}) or "values"
        return f"a list of {items}"
    if "properties" in schema:
        return f"a section with keys such as {join_words(list(schema['properties'])[:3], 'and')}"
    if kind == "object":
        inside = schema.get("additionalProperties")
        by_step = isinstance(inside, Mapping) and inside.get("type") == "number"
        return "numbers by whole steps, as in {0: 1.0, 1000: 0.5}" if by_step else "a section of `name: value` pairs"
    if schema.get("minLength"):
        return "text of at least one character (in quotes if it looks like a number)"
    words = {"string": "text (in quotes if it looks like a number)", "boolean": "true or false"}
    return words.get(str(kind), "a value")


def _plural(schema: Mapping[str, Any]) -> str:
    return "sections" if "properties" in schema else {"string": "words"}.get(str(schema.get("type")), "values")


def _limits(schema: Mapping[str, Any]) -> str:
    """` from 0 to 1`, ` above 0`, ` of at least 1`."""
    low, high = schema.get("minimum"), schema.get("maximum")
    high = None if high is not None and high >= LARGEST else high  # said only where it is the trouble
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    lows = f" of at least {low:g}" if low is not None else f" above {above:g}" if above is not None else ""
    highs = f"at most {high:g}" if high is not None else f"below {below:g}" if below is not None else ""
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    return f"{lows} and {highs}" if lows and highs else lows or (f" of {highs}" if highs else "")


def _placed(found: Any, tree: Node) -> Problem:
    """A cross-field problem with the place of the first of its keys that was given."""
    for key in found.keys:
        node = find(tree, key.split("."))
        if node is not None:
            return Problem(node.where, found.keys[0], found.message)
    return Problem("default", found.keys[0], found.message)


def _touches(keys: tuple[str, ...], dropped: set[Path]) -> bool:
    """Returns whether any of the keys was dropped, or lies in or around something that was."""
    names = [dotted(path) for path in dropped]
    return any(key == n or key.startswith(n + ".") or n.startswith(key + ".") for key in keys for n in names)
