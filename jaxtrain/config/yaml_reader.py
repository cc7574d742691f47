"""YAML reader: text becomes a tree of values with line numbers, safely and in bounded time.

Reads mappings, lists and plain scalars: tags of Python objects are errors, aliases are expanded up to a limit, and a
duplicate key is an error. Scalars follow the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema), so
`1e-3` is a number and `on` is a word; `_` may group digits.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import yaml

from jaxtrain.config.provenance import MAX_DEPTH, MAX_DIGITS, Node, has_surrogates
from jaxtrain.errors import Problem, escape_unprintable, format_value

MAX_BYTES = 128 * 1024
MAX_VALUES = 20_000  # after aliases are expanded

INT = re.compile(r"[-+]?[0-9](?:_?[0-9])*|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9](?:_?[0-9])*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
SPECIAL_FLOAT = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True), **dict.fromkeys(("false", "False", "FALSE"), False),
}  # fmt: skip
TAG = "tag:yaml.org,2002:"
PLAIN = TAG + "plain"  # a scalar without quotes and without a tag


class _Composer(yaml.SafeLoader):
    """Composes YAML nodes, leaves plain scalars to `parse_scalar` and stops at deep nesting."""

    depth = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        return PLAIN if kind is yaml.ScalarNode and implicit[0] else super().resolve(kind, value, implicit)

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_file(path: Path, name: str, problems: list[Problem], origin: str | None = None) -> Node | None:
    """Returns the tree of a YAML file; an empty file is an empty section. None, with a problem, if it is not readable.

    Args:
        path: the file, in UTF-8.
        name: name of the file in messages.
        problems: problems are appended here.
        origin: origin of all values; default: their location.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            hint = f"; did you mean {name}/config.yaml?" if (path / "config.yaml").is_file() else ""
            raise ValueError(f"is not a file{hint}" if hint or not path.is_dir() else "is a folder, not a YAML file")
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"is larger than {MAX_BYTES // 1024} KiB; a config is a few lines")
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = Problem(f"{name}:{line}", "", "is not UTF-8 text")
    except FileNotFoundError:
        problem = Problem(name, "", "no such file")
    except OSError as error:
        problem = Problem(name, "", f"cannot be read: {error.strerror or error}")
    except ValueError as error:
        problem = Problem(name, "", str(error))
    else:
        node = read_text(text, name, problems, origin=origin)
        if node is None or isinstance(node.value, dict):
            return node
        if node.value is None:
            return Node({}, node.where, node.origin)
        problem = Problem(node.where, "", f"expected `key: value` lines, found {format_value(node.value)}")
    problems.append(problem)
    return None


def read_text(
    text: str, name: str, problems: list[Problem], has_lines: bool = True, origin: str | None = None
) -> Node | None:
    """Returns the tree of YAML text; None, with a problem, if it is not YAML.

    Args:
        text: the YAML.
        name: name of the text in messages.
        problems: problems are appended here.
        has_lines: whether locations are `NAME:LINE` or just `NAME`.
        origin: origin of all values; default: their location.
    """
    builder = _TreeBuilder(name, problems, has_lines, origin)
    try:
        root = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        where = builder.location(error.problem_mark or error.context_mark)
        reason = " ".join(filter(None, (error.context, error.problem)))
    except (yaml.YAMLError, ValueError, OverflowError, IndexError, RecursionError) as error:
        # PyYAML lets some malformed escapes and marks through as plain Python errors.
        where, reason = name, " ".join(str(error).split())[:120]
    else:
        return builder.node(None, builder.location(None)) if root is None else builder.build(root, "", 0)
    problems.append(Problem(where, "", f"is not valid YAML: {escape_unprintable(reason)}"))
    return None


class _TreeBuilder:
    """Converts YAML nodes to the tree. Adds problems, never raises."""

    def __init__(self, name: str, problems: list[Problem], has_lines: bool, origin: str | None) -> None:
        self.name, self.problems, self.has_lines, self.origin = name, problems, has_lines, origin
        self.values = 0

    def location(self, mark: Any) -> str:
        return f"{self.name}:{(mark.line if mark else 0) + 1}" if self.has_lines else self.name

    def node(self, value: Any, where: str) -> Node:
        return Node(value, where, self.origin or where)

    def report(self, where: str, key: str, message: str) -> None:
        self.problems.append(Problem(where, key, message))

    def build(self, node: Any, key: str, depth: int, where: str | None = None) -> Node:
        """Returns the tree under a YAML node. An invalid value becomes null, with a problem."""
        where = where or self.location(node.start_mark)
        self.values += 1
        if self.values == MAX_VALUES + 1:
            self.report(where, key[:80], f"more than {MAX_VALUES} values, aliases expanded")
        if self.values <= MAX_VALUES and depth > MAX_DEPTH:
            self.report(where, key[:80], f"nested more than {MAX_DEPTH} levels deep, or an alias inside itself")
        value = None
        if self.values > MAX_VALUES or depth > MAX_DEPTH:
            pass
        elif isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            value = self.mapping(node, key, depth)
        elif isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            value = [self.build(item, f"{key}.{i}", depth + 1) for i, item in enumerate(node.value)]
        elif isinstance(node, yaml.ScalarNode) and node.tag in (PLAIN, TAG + "str"):
            value = self.scalar(node, key, where)
        else:
            self.report(where, key, f"the tag {format_value(node.tag)} is not allowed in a config; write plain values")
        return self.node(value, where)

    def mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Node]:
        """Returns the children of a mapping; its own keys override those of merge keys (`<<`)."""
        children: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = self.location(key_node.start_mark)
            name = self.key(key_node, key, where)
            if name is None:
                continue
            if name == "<<":
                merged = self.merged_keys(value_node, key, depth, where) | merged
                continue
            path = f"{key}.{name}" if key else name
            if name in children:
                line = children[name].where.rpartition(":")[2]
                self.report(where, path, f"given twice; first in line {line}" if self.has_lines else "given twice")
            children[name] = self.build(value_node, path, depth + 1, where)
        return merged | children

    def merged_keys(self, node: Any, key: str, depth: int, where: str) -> dict[str, Node]:
        """Returns the keys that `<<: *anchor` or `<<: [*a, *b]` adds; the first anchor wins."""
        built = self.build(node, key, depth + 1, where)
        result: dict[str, Node] = {}
        for part in built.value if isinstance(built.value, list) else [built]:
            if isinstance(part.value, dict):
                result = part.value | result
            else:
                message = "a merge key takes the alias of a section, e.g. `<<: *name`"
                self.report(where, f"{key}.<<".lstrip("."), message)
        return result

    def key(self, node: Any, parent: str, where: str) -> str | None:
        """Returns a key as text: a word, or the whole number of a table by step."""
        value = None
        if not isinstance(node, yaml.ScalarNode):
            self.report(where, parent, "a key is a word, not a section or a list")
        elif (value := self.scalar(node, parent, where)) is None or isinstance(value, (bool, float)):
            message = f"a key is a word, not {format_value(value)}; put it in quotes if it is meant as text"
            self.report(where, parent, message)
            return None
        return None if value is None else str(value)

    def scalar(self, node: yaml.ScalarNode, key: str, where: str) -> Any:
        """Returns the value of a scalar; None, with a problem, if it has none."""
        try:
            if has_surrogates(node.value):
                raise ValueError("the text is not valid Unicode")
            return parse_scalar(node.value) if node.tag == PLAIN else node.value
        except ValueError as error:
            self.report(where, key, str(error))
            return None


def parse_scalar(text: str) -> Any:
    """Returns the value of a plain scalar by the YAML 1.2 core schema.

    Raises:
        ValueError: a number has more than `MAX_DIGITS` digits.
    """
    if text in CONSTANTS:
        return CONSTANTS[text]
    if INT.fullmatch(text):
        digits = text.replace("_", "")
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"the number has more than {MAX_DIGITS} digits")
        base = {"0o": 8, "0x": 16}.get(digits[:2], 10)
        return int(digits[2:] if base != 10 else digits, base)
    if FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return float(text.replace(".", "", 1)) if SPECIAL_FLOAT.fullmatch(text) else text
