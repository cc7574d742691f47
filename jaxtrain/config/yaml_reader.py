"""YAML text to a tree of values with line numbers, safely and in bounded time.

Only mappings, lists and plain scalars are read: tags that name Python objects are refused, aliases are
expanded within a limit, and a key given twice is an error. Scalars follow the YAML 1.2 core schema
(https://yaml.org/spec/1.2.2/#103-core-schema), so `1e-3` is a number and `on` is a word; `_` may group digits.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from jaxtrain.config.provenance import DEPTH, Node, bad_text
from jaxtrain.errors import Problem, escape_unprintable, format_value

MAX_BYTES = 128 * 1024
MAX_VALUES = 20_000  # after aliases are expanded
MAX_DIGITS = 40

INT = re.compile(r"[-+]?[0-9](?:_?[0-9])*|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9](?:_?[0-9])*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
SPECIAL_FLOAT = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
NULLS = ("", "~", "null", "Null", "NULL")
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
TAG = "tag:yaml.org,2002:"
PLAIN = TAG + "plain"  # a scalar without quotes and without a tag
KINDS = {TAG + "str": str, TAG + "int": int, TAG + "float": (int, float), TAG + "bool": bool, TAG + "null": type(None)}


class Composer(yaml.SafeLoader):
    """A composer that leaves plain scalars to `typed` and stops at deep nesting."""

    depth = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        return PLAIN if kind is yaml.ScalarNode and implicit[0] else super().resolve(kind, value, implicit)

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        try:
            if self.depth > DEPTH:
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(problem=f"nested more than {DEPTH} levels deep", problem_mark=mark)
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def read_file(path: Path, name: str, problems: list[Problem]) -> Node | None:
    """The tree of a YAML file; None, with the problem noted, where it cannot be read.

    Args:
        path: the file.
        name: how messages call it.
        problems: problems are appended here.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            hint = f"; did you mean {name}/config.yaml?" if (path / "config.yaml").is_file() else ""
            raise ValueError(f"is not a file{hint}" if hint or not path.is_dir() else "is a folder, not a YAML file")
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"is larger than {MAX_BYTES // 1024} KiB; a config is a few lines")
    except FileNotFoundError:
        problems.append(Problem(name, "", "no such file"))
    except OSError as error:
        problems.append(Problem(name, "", f"cannot be read: {error.strerror or error}"))
    except ValueError as error:
        problems.append(Problem(name, "", str(error)))
    else:
        return read_bytes(raw, name, problems)
    return None


def read_bytes(raw: bytes, name: str, problems: list[Problem]) -> Node | None:
    """The tree of UTF-8 YAML; an empty file is an empty section."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problems.append(Problem(f"{name}:{line}", "", "is not UTF-8 text"))
        return None
    node = read_text(text, name, problems)
    if node is not None and node.value is None:
        return Node({}, node.where, node.origin)
    if node is not None and not isinstance(node.value, dict):
        problems.append(Problem(node.where, "", f"expected `key: value` lines, found {format_value(node.value)}"))
        return None
    return node


def read_text(text: str, name: str, problems: list[Problem], lines: bool = True) -> Node | None:
    """The tree of YAML text; None, with the problem noted, where it is not YAML.

    Args:
        text: the YAML.
        name: how messages call the text.
        problems: problems are appended here.
        lines: whether places are `NAME:LINE` or just `NAME`.
    """
    builder = _Builder(name, problems, lines)
    try:
        composer = Composer(text)
        root = composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem)))
        problems.append(Problem(builder.place(mark), "", f"is not valid YAML: {escape_unprintable(what)}"))
    except (yaml.YAMLError, ValueError, OverflowError, IndexError, RecursionError) as error:
        # PyYAML lets some malformed escapes and marks through as plain Python errors.
        what = " ".join(str(error).split())[:120]
        problems.append(Problem(name, "", f"is not valid YAML: {escape_unprintable(what)}"))
    else:
        first = builder.place(None)
        return Node(None, first, first) if root is None else builder.build(root, "", 0)
    return None


class _Builder:
    """Turns YAML nodes into the tree; problems are appended, never raised."""

    def __init__(self, name: str, problems: list[Problem], lines: bool) -> None:
        self.name, self.problems, self.lines = name, problems, lines
        self.values = 0

    def place(self, mark: Any) -> str:
        return f"{self.name}:{(mark.line if mark else 0) + 1}" if self.lines else self.name

    def note(self, where: str, key: str, message: str) -> None:
        self.problems.append(Problem(where, key, message))

    def build(self, node: Any, key: str, depth: int, where: str | None = None) -> Node:
        """The tree under a YAML node; what cannot be read becomes null, with a problem."""
        where = where or self.place(node.start_mark)
        self.values += 1
        if self.values == MAX_VALUES + 1:
            self.note(where, key[:80], f"more than {MAX_VALUES} values, aliases expanded")
        if self.values > MAX_VALUES:
            return Node(None, where, where)
        if depth > DEPTH:
            self.note(where, key[:80], f"nested more than {DEPTH} levels deep, or an alias inside itself")
            return Node(None, where, where)
        value = None
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            value = self.mapping(node, key, depth)
        elif isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            value = [self.build(item, f"{key}.{i}", depth + 1) for i, item in enumerate(node.value)]
        elif isinstance(node, yaml.ScalarNode):
            value = self.scalar(node, key, where)
        else:
            self.note(where, key, f"the tag {format_value(node.tag)} is not allowed in a config; write plain values")
        return Node(value, where, where)

    def mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Node]:
        """Children of a mapping; merge keys (`<<`) lie under the mapping's own keys."""
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = self.place(key_node.start_mark)
            name = self.key(key_node, key, where)
            if name is None:
                continue
            if name == "<<":
                for child, value in self.merge_key(value_node, key, depth, where).items():
                    merged.setdefault(child, value)
                continue
            full = f"{key}.{name}" if key else name
            if name in own:
                first = own[name].where.rpartition(":")[2]
                self.note(where, full, f"given twice; first in line {first}" if self.lines else "given twice")
            own[name] = self.build(value_node, full, depth + 1, where)
        return {**merged, **own}

    def merge_key(self, node: Any, key: str, depth: int, where: str) -> dict[str, Node]:
        """Returns the keys that `<<: *anchor` or `<<: [*a, *b]` adds; the first anchor wins."""
        built = self.build(node, key, depth + 1, where)
        parts = built.value if isinstance(built.value, list) else [built]
        result: dict[str, Node] = {}
        for part in parts:
            if not isinstance(part.value, dict):
                self.note(where, f"{key}.<<".lstrip("."), "a merge key takes the alias of a section, e.g. `<<: *name`")
                continue
            for name, value in part.value.items():
                result.setdefault(name, value)
        return result

    def key(self, node: Any, parent: str, where: str) -> str | None:
        """A key as text: words, and the whole numbers of step -> value tables."""
        if not isinstance(node, yaml.ScalarNode):
            self.note(where, parent, "a key is a word, not a section or a list")
            return None
        value = self.scalar(node, parent, where)
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            self.note(
                where, parent, f"a key is a word, not {format_value(value)}; put it in quotes if it is meant as text"
            )
            return None
        return str(value)

    def scalar(self, node: yaml.ScalarNode, key: str, where: str) -> Any:
        """A scalar by the core schema, by its tag if it has one of the standard tags."""
        text: str = node.value
        if bad_text(text):
            self.note(where, key, "the text is not valid Unicode")
            return None
        if node.tag == TAG + "str":
            return text
        if node.tag != PLAIN and node.tag not in KINDS:
            self.note(where, key, f"the tag {format_value(node.tag)} is not allowed in a config; write plain values")
            return None
        try:
            value = typed(text)
        except ValueError as error:
            self.note(where, key, str(error))
            return None
        if node.tag != PLAIN and not isinstance(value, KINDS[node.tag]):
            self.note(where, key, f"{format_value(text)} is no !!{node.tag.removeprefix(TAG)}")
        return value


def typed(text: str) -> Any:
    """The value of a plain scalar by the YAML 1.2 core schema. Raises ValueError where a number is too long."""
    if text in NULLS:
        return None
    if text in BOOLS:
        return BOOLS[text]
    if INT.fullmatch(text):
        digits = text.replace("_", "")
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"the number has more than {MAX_DIGITS} digits")
        base = {"0o": 8, "0x": 16}.get(digits[:2], 10)
        return int(digits[2:] if base != 10 else digits, base)
    if FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return float(text.replace(".", "", 1)) if SPECIAL_FLOAT.fullmatch(text) else text
