"""Values with the place they came from, and how levels of them merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import Problem, format_value

MAX_DEPTH = 24  # levels of nesting of a config
MAX_DIGITS = 40
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, a `dict[str, Node]` or a `list[Node]`.

    Attributes:
        value: the value.
        where: location that errors name, e.g. `configs/layouts/fsdp.yaml:4`.
        origin: what provenance shows, e.g. `layout fsdp`; often equal to `where`.
    """

    value: Any
    where: str
    origin: str


def to_python(node: Node) -> Any:
    """Returns the bare value: dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: to_python(child) for key, child in node.value.items()}
    return [to_python(child) for child in node.value] if isinstance(node.value, list) else node.value


def merge(under: Node | None, over: Node) -> Node:
    """Merges `over` onto `under`: sections merge key by key, everything else is replaced.

    If a section's `type` changes, the `options` of the other type are dropped.
    """
    if under is None or not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(under.value)
    kind = over.value.get("type")
    if kind is not None and "options" in merged and (merged.get("type") is None or merged["type"].value != kind.value):
        del merged["options"]
    for key, child in over.value.items():
        merged[key] = merge(merged.get(key), child)
    return Node(merged, over.where, over.origin)


def without_keys(node: Node, keys: Sequence[str]) -> Node:
    """Returns a section without some of its keys."""
    return Node({key: child for key, child in node.value.items() if key not in keys}, node.where, node.origin)


def find_node(node: Node, path: Sequence[str | int]) -> Node | None:
    """Returns the node at a path, or None."""
    last, existing = deepest_node(node, path)
    return last if len(existing) == len(path) else None


def deepest_node(node: Node, path: Sequence[str | int]) -> tuple[Node, KeyPath]:
    """Returns the last node that exists along a path, and the part of the path that leads to it."""
    for length, part in enumerate(path):
        value = node.value
        if isinstance(value, list) and _is_index(str(part), value):
            node = value[int(part)]
        elif isinstance(value, dict) and str(part) in value:
            node = value[str(part)]
        else:
            return node, tuple(path[:length])
    return node, tuple(path)


def _is_index(part: str, items: Sequence[Any]) -> bool:
    return part.isdecimal() and len(part) < 7 and int(part) < len(items)


def from_python(value: Any, where: str, problems: list[Problem], path: KeyPath = ()) -> Node:
    """Returns the tree of dicts, lists, tuples and scalars. Adds a problem for anything else."""
    key, problem = dotted(path), None
    if len(path) > MAX_DEPTH:
        value, key, problem = None, key[:80], f"nested more than {MAX_DEPTH} levels deep"
    elif isinstance(value, dict):
        children = {}
        for name, child in value.items():
            if not isinstance(name, (str, int)) or isinstance(name, bool) or has_surrogates(str(name)):
                problem = f"keys are words, not {format_value(repr(name))}"
            elif problem is None:
                children[str(name)] = from_python(child, where, problems, (*path, name))
        value = children
    elif isinstance(value, (list, tuple)):
        value = [from_python(item, where, problems, (*path, i)) for i, item in enumerate(value)]
    elif not isinstance(value, (str, int, float, bool, type(None))):
        value, problem = None, f"a {type(value).__name__} is no config value; give text or numbers"
    elif isinstance(value, str) and has_surrogates(value):
        value, problem = None, "the text is not valid Unicode"
    elif isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        value, problem = None, f"the number has more than {MAX_DIGITS} digits"
    if problem:
        problems.append(Problem(where, key, problem))
    return Node(value, where, where)


def has_surrogates(text: str) -> bool:
    """Returns whether the text has lone surrogates, which UTF-8 cannot encode."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def dotted(path: Sequence[str | int]) -> str:
    """Returns `data.sources.0.path`."""
    return ".".join(map(str, path))


def set_value(root: Node, path: Sequence[str], leaf: Node, defaults: Any, problems: list[Problem]) -> Node:
    """Returns the tree with `leaf` merged in at a path. Missing sections are created; items of lists must exist.

    Args:
        root: the tree.
        path: keys from the root to the leaf.
        leaf: the value to set.
        defaults: default value at `root`, so that an item of a default list can be changed too.
        problems: a problem is appended here if the path does not exist.
    """
    if not path:
        return merge(root, leaf)
    head, rest, value = path[0], path[1:], root.value
    if not isinstance(value, (dict, list)) and isinstance(defaults, (list, tuple)) and head.isdecimal():
        value = from_python(defaults, "default", problems).value
    if isinstance(value, list):
        if not _is_index(head, value):
            items = f"0 to {len(value) - 1}" if value else "none, it is empty"
            problems.append(Problem(leaf.where, "", f"`{head}` is no item of this list; its items are {items}"))
            return root
        default = defaults[int(head)] if isinstance(defaults, (list, tuple)) and _is_index(head, defaults) else None
        items = list(value)
        items[int(head)] = set_value(items[int(head)], rest, leaf, default, problems)
        return Node(items, root.where, root.origin)
    default = defaults.get(head) if isinstance(defaults, dict) else None
    child = value.get(head) if isinstance(value, dict) else None
    count = len(problems)
    child = set_value(child or Node(None, leaf.where, leaf.origin), rest, leaf, default, problems)
    return root if len(problems) > count else merge(root, Node({head: child}, leaf.where, leaf.origin))
