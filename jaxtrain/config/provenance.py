"""Values that know where they came from, and how levels of them merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import Problem, format_value

DEPTH = 24  # levels of nesting a config may have
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, a `dict[str, Node]` or a `list[Node]`.

    Args:
        value: the value.
        where: where errors point to, e.g. `configs/layouts/fsdp.yaml:4`.
        origin: what provenance shows, e.g. `layout fsdp`; often the same.
    """

    value: Any
    where: str
    origin: str


def plain(node: Node) -> Any:
    """The bare value: dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    return [plain(child) for child in node.value] if isinstance(node.value, list) else node.value


def merge(under: Node | None, over: Node) -> Node:
    """Merges `over` onto `under`: sections merge key by key, everything else is replaced.

    Where a section's `type` changes, its earlier `options` belong to the other type and go.
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


def find(node: Node, path: Sequence[str | int]) -> Node | None:
    """The node at a path, or None."""
    for part in path:
        value = node.value
        if isinstance(value, list) and str(part).isdecimal() and len(str(part)) < 6 and int(part) < len(value):
            node = value[int(part)]
        elif isinstance(value, dict) and str(part) in value:
            node = value[str(part)]
        else:
            return None
    return node


def deepest(node: Node, path: Sequence[str | int]) -> tuple[Node, Path]:
    """The last node that exists along a path, and the part of the path that leads to it."""
    for length in range(len(path), 0, -1):
        found = find(node, path[:length])
        if found is not None:
            return found, tuple(path[:length])
    return node, ()


def from_python(value: Any, where: str, problems: list[Problem], path: Path = ()) -> Node:
    """A tree from dicts, lists, tuples and scalars; anything else is a problem."""
    key = dotted(path)
    if len(path) > DEPTH:
        problems.append(Problem(where, key[:80], f"nested more than {DEPTH} levels deep"))
        return Node(None, where, where)
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, (str, int)) or isinstance(name, bool) or bad_text(str(name)):
                problems.append(Problem(where, key, f"keys are words, not {format_value(repr(name))}"))
        names = {str(n): v for n, v in value.items() if isinstance(n, (str, int))}
        return Node({n: from_python(v, where, problems, (*path, n)) for n, v in names.items()}, where, where)
    if isinstance(value, (list, tuple)):
        items = [from_python(item, where, problems, (*path, i)) for i, item in enumerate(value)]
        return Node(items, where, where)
    if not isinstance(value, (str, int, float, bool, type(None))):
        problems.append(Problem(where, key, f"a {type(value).__name__} is no config value; give text or numbers"))
        return Node(None, where, where)
    if isinstance(value, str) and bad_text(value):
        problems.append(Problem(where, key, "the text is not valid Unicode"))
        return Node(None, where, where)
    if isinstance(value, int) and abs(value) >= 10**40:
        problems.append(Problem(where, key, "the number has more than 40 digits"))
        return Node(None, where, where)
    return Node(value, where, where)


def bad_text(text: str) -> bool:
    """Returns whether the text holds lone surrogates, which no file can hold in UTF-8."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def dotted(path: Sequence[str | int]) -> str:
    """`data.sources.0.path`."""
    return ".".join(map(str, path))


def put(root: Node, path: Sequence[str], leaf: Node, defaults: Any, problems: list[Problem]) -> Node:
    """The tree with `leaf` merged in at a path; sections on the way are made, list items must exist.

    Args:
        defaults: the plain default at `root`, so that an item of a default list can be changed too.
    """
    if not path:
        return merge(root, leaf)
    head, rest = path[0], path[1:]
    value = root.value
    if not isinstance(value, (dict, list)) and isinstance(defaults, (list, tuple)) and head.isdecimal():
        value = from_python(list(defaults), "default", problems).value
    if isinstance(value, list):
        if not head.isdecimal() or len(head) > 6 or int(head) >= len(value):
            has = f"0 to {len(value) - 1}" if value else "none, it is empty"
            problems.append(Problem(leaf.where, "", f"`{head}` is no item of this list; its items are {has}"))
            return root
        index = int(head)
        default = defaults[index] if isinstance(defaults, (list, tuple)) and index < len(defaults) else None
        items = list(value)
        items[index] = put(items[index], rest, leaf, default, problems)
        return Node(items, root.where, root.origin)
    default = defaults.get(head) if isinstance(defaults, dict) else None
    child = value.get(head) if isinstance(value, dict) else None
    noted = len(problems)
    child = put(child or Node(None, leaf.where, leaf.origin), rest, leaf, default, problems)
    return root if len(problems) > noted else merge(root, Node({head: child}, leaf.where, leaf.origin))
