"""Validation of a merged config tree, with every problem in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.checks import Conflict, cross_problems, path_problems
from jaxtrain.config.key_names import section_keys, unknown_key
from jaxtrain.config.provenance import KeyPath, Node, deepest_node, dotted, to_python
from jaxtrain.config.schema import Config
from jaxtrain.errors import MAX_VALUE_LENGTH, Problem, did_you_mean, format_value, join_words

# What no config may hold, because it is saved with every run and checkpoint, and sent to trackers.
_PASSWORD = re.compile(r"(?<=://)([^/?#@\s:]*):([^/?#@\s]+)(?=@)")  # of `scheme://user:password@host`
_MESSAGE = (
    "holds a password, which would be saved with the run; expected it where the store's library looks for it: in the "
    "environment or a file of its own"
)
ROUNDS = 8  # of removing invalid keys to check the rest
# Type of a pydantic error -> what its message expects, with fields from pydantic's context.
EXPECTED = {
    "bool_type": "true or false", "dict_type": "a section of keys", "finite_number": "a finite number",
    "float_type": "a number", "greater_than": "more than {gt:g}", "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number", "int_parsing": "whole numbers as keys", "int_type": "a whole number",
    "less_than": "less than {lt}", "less_than_equal": "at most {le}", "literal_error": "{expected}",
    "missing": "one more value", "model_type": "a section with keys such as {keys}",
    "string_pattern_mismatch": "a name of letters, digits, `_`, `.` and `-`, that starts with a letter or digit",
    "string_type": "text (in quotes if it looks like a number)", "too_long": "at most {max_length} values",
    "tuple_type": "a list",
}  # fmt: skip


def validate(tree: Node, problems: list[Problem], paths: bool = True) -> tuple[Config, set[KeyPath]]:
    """Creates a Config from the merged tree. Invalid keys are removed, so that the others are checked too.

    Args:
        tree: the merged levels.
        problems: problems are appended here; if there are any, the Config is only good for further checks.
        paths: whether the files that the config reads must exist.

    Returns:
        the Config, and the paths that were removed from it.
    """
    values = to_python(tree)
    removed: set[KeyPath] = set()
    for _ in range(ROUNDS):
        try:
            config = Config.model_validate(values)
        except ValidationError as error:
            removed |= _remove_invalid(error, tree, values, problems)
            continue
        conflicts = [*cross_problems(config), *(path_problems(config) if paths else ())]
        names = [dotted(path) for path in removed]
        problems += [_with_location(one, tree) for one in conflicts if not _concerns(one.keys, names)]
        return config, removed
    return Config(), {*removed, ()}


def _remove_invalid(
    error: ValidationError, tree: Node, values: dict[str, Any], problems: list[Problem]
) -> set[KeyPath]:
    """Adds a problem for each invalid key and removes these keys from `values`. Returns what it removed."""
    reported, removed = {(problem.where, problem.key) for problem in problems}, set()
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        is_of_key = location[-1:] == ("[key]",) and detail["type"] != "extra_forbidden"  # pydantic's mark, not a name
        node, path = deepest_node(tree, location[:-2] if is_of_key else location)
        if (node.where, dotted(path)) not in reported:  # else the reader found that it is no value at all
            reported.add((node.where, dotted(path)))
            parts = [str(part) for part in path]
            key = dotted([f"{part[:MAX_VALUE_LENGTH]}..." if len(part) > MAX_VALUE_LENGTH else part for part in parts])
            problems.append(Problem(node.where, key, _message(detail, path, to_python(node))))
        removed.add(_remove(values, path))
    return removed


def _remove(values: dict[str, Any], path: KeyPath) -> KeyPath:
    """Removes a key, or for an item of a list the list. Returns the path of what it removed."""
    for length in range(len(path) - 1, -1, -1):
        parent: Any = values
        for part in path[:length]:
            inside = parent.get(str(part)) if isinstance(parent, dict) else parent[int(part)]
            parent = inside if isinstance(inside, (dict, list)) else {}  # may be removed already
        if isinstance(parent, dict):
            parent.pop(str(path[length]), None)
            return path[: length + 1]
    values.clear()
    return ()


def _message(detail: Mapping[str, Any], path: KeyPath, value: Any) -> str:
    """Returns one plain sentence for one pydantic error."""
    if detail["type"] == "extra_forbidden":
        return unknown_key(path)
    hint, expected = "", detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if detail["type"] in EXPECTED:
        names = {"keys": join_words(section_keys(path)[:3], "and"), **detail.get("ctx", {})}
        expected = EXPECTED[detail["type"]].format_map(names).replace("'", "")
    if detail["type"] == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, re.findall(r"'(.*?)'", detail["ctx"]["expected"]))
    return f"expected {expected}; found {format_value(value)}{hint}"


def _with_location(conflict: Conflict, tree: Node) -> Problem:
    """Returns a problem located at the first of the conflict's keys that was given."""
    nodes = (_given(tree, key.split(".")) for key in conflict.keys)
    where = next((node.where for node in nodes if node is not None), "default")
    return Problem(where, conflict.keys[0], conflict.message)


def _given(tree: Node, path: list[str]) -> Node | None:
    """Returns the node of a key; of a section that is given as text, that text."""
    node, existing = deepest_node(tree, path)
    return node if len(existing) == len(path) or isinstance(node.value, str) else None


def _concerns(keys: tuple[str, ...], removed: list[str]) -> bool:
    """Returns whether any of the keys was removed, or is in or around something that was."""
    return any(key == n or key.startswith(n + ".") or n.startswith(key + ".") for key in keys for n in removed)


def without_passwords(node: Node, problems: list[Problem], key: str = "") -> Node:
    """Returns a tree in which `***` stands for passwords in URLs, each of which is a problem."""
    if isinstance(node.value, dict):
        children = {
            name: without_passwords(child, problems, f"{key}.{name}".strip(".")) for name, child in node.value.items()
        }
        return Node(children, node.where, node.origin)
    if isinstance(node.value, list):
        children = [without_passwords(child, problems, f"{key}.{index}") for index, child in enumerate(node.value)]
        return Node(children, node.where, node.origin)
    if not isinstance(node.value, str) or not _PASSWORD.search(node.value):
        return node
    problems.append(Problem(node.where, key, _MESSAGE))
    return Node(_PASSWORD.sub(r"\1:***", node.value), node.where, node.origin)
