"""YAML files, a layout and `key=value` overrides to one frozen `Config`.

Levels, later ones win: defaults < the Hugging Face model of `model.from` < files along `extends:` < the file <
`key=value`. Naming a layout at a level replaces what layouts hold (`LAYOUT_KEYS`: mesh, rules ...) of all earlier
levels by the layout's own; the same keys at that level or later refine them. A file that says `resolved: true` is
complete by itself: its layout and its `from` are only names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.provenance import DEPTH, Node, deepest, find, from_python, merge, plain, put
from jaxtrain.config.schema import LAYOUT_KEYS, Config
from jaxtrain.config.shipped import display, find_file, find_layout
from jaxtrain.config.show import flatten
from jaxtrain.config.validate import all_keys, validate
from jaxtrain.config.yaml_reader import read_file, read_text
from jaxtrain.errors import ConfigError, Problem, UserError, add_locations, did_you_mean, format_value, join_words

COMMAND_LINE = "command line"
MAX_FILES = 64
FILE_KEYS = ("extends", "resolved")  # what only a file may say
CHECKED = ("layout", *LAYOUT_KEYS, "model", "data", "step")  # sections that later checks look at
Check = Callable[[Config], Iterable[Problem]]
Fit = Callable[[Config, dict[str, str]], Config]
ReadModel = Callable[[Path], dict[str, Any]]  # a Hugging Face folder -> its `model` section


@dataclass(frozen=True)
class Level:
    """One file, or the base dict: its tree without the keys only a file may have."""

    tree: Node
    folder: Path | None
    resolved: bool


def load(path: str | os.PathLike[str] | None, *overrides: str, base: dict[str, Any] | None = None) -> Config:
    """The config of a file (or of the defaults, for None) with `key=value` overrides.

    Args:
        path: YAML file, relative to the working folder, or a shipped one such as `configs/quickstart.yaml`.
        overrides: e.g. `"mesh.model=4"`; values are YAML.
        base: values under the file, above the defaults.

    Raises:
        ConfigError: with every problem, one line each.
    """
    return resolve(path, *overrides, base=base)[0]


def resolve(
    path: str | os.PathLike[str] | None,
    *overrides: str,
    base: dict[str, Any] | None = None,
    paths: bool = True,
    checks: Iterable[Check] = (),
    read_model: ReadModel | None = None,
    fit: Fit | None = None,
    notes: list[str] | None = None,
) -> tuple[Config, dict[str, str]]:
    """`load`, and where each value came from.

    Args:
        path: as for `load`.
        overrides: as for `load`.
        base: as for `load`.
        paths: whether the data and the tokenizer must be there; False to look at a config of another machine.
        checks: further checks (of the layout), whose problems are reported together with all others.
        read_model: reads the folder that `model.from` names: its `model` section.
        fit: fits a valid config to its devices, before the checks; gets the provenance, which it may change.
        notes: gets a line for each value that is not used as it is written.

    Returns:
        the Config, and dotted key -> `default`, `FILE:LINE`, `layout NAME` or `command line`.

    Raises:
        ConfigError: with every problem, one line each.
    """
    problems: list[Problem] = []
    levels: list[Level] = []
    if base is not None:
        levels.append(_base_level(base, problems))
    if path is not None:
        file = find_file(os.fspath(path), None) if isinstance(os.fspath(path), str) else Path(os.fsdecode(path))
        _collect(file, [], levels, problems)
    unread = bool(problems)
    given = _overrides(overrides, problems)
    tree = _merge(levels, given, problems, [] if notes is None else notes)
    if not any(level.resolved for level in levels):
        tree = _with_imported(tree, read_model, problems) if read_model else tree
    config, dropped = validate(tree, problems, paths and not unread)
    provenance = {key: _origin(tree, key) for key in flatten(config)}
    # Without the layout the mesh is not what was meant.
    is_whole = not unread and all(problem.key != "layout" for problem in problems)
    if is_whole and not any(not at or at[0] in CHECKED for at in dropped):
        config = fit(config, provenance) if fit else config
        found = [problem for check in checks for problem in check(config)]
        problems += add_locations(found, provenance)
    if problems:
        raise ConfigError(problems)
    return config, provenance


def _origin(tree: Node, key: str) -> str:
    path = key.split(".")
    node, known = deepest(tree, path)
    if len(known) < len(path) and isinstance(node.value, (dict, list)):
        return "default"
    return node.origin


def _base_level(base: dict[str, Any], problems: list[Problem]) -> Level:
    tree = from_python(base, "base", problems)
    if not isinstance(tree.value, dict):
        problems.append(Problem("base", "", f"expected a dict of sections, found {format_value(plain(tree))}"))
        tree = Node({}, "base", "base")
    return _level(tree, None, problems)


def _level(tree: Node, folder: Path | None, problems: list[Problem]) -> Level:
    """A level from its tree, less `extends` and `resolved`."""
    resolved = tree.value.get("resolved")
    if resolved is not None and not isinstance(resolved.value, bool):
        message = f"expected true or false; found {format_value(plain(resolved))}"
        problems.append(Problem(resolved.where, "resolved", message))
    complete = resolved is not None and resolved.value is True
    rest = Node({key: node for key, node in tree.value.items() if key not in FILE_KEYS}, tree.where, tree.origin)
    return Level(rest, folder, complete)


def _collect(path: Path, stack: list[Path], levels: list[Level], problems: list[Problem], named: str = "") -> None:
    """Appends the levels of a file: first what it extends, in order, then itself.

    Args:
        path: the file.
        stack: real paths of the files that led here, outermost first.
        levels: levels are appended here.
        problems: problems are appended here.
        named: where an `extends` names this file; empty for the first one.
    """
    name = display(path)
    real = Path(os.path.realpath(path)) if "\0" not in str(path) else path
    if real in stack:
        chain = " -> ".join(display(p) for p in [*stack[stack.index(real) :], real])
        problems.append(Problem(named, "extends", f"the files extend each other in a circle: {chain}"))
        return
    if len(levels) >= MAX_FILES:
        problems.append(Problem(named, "extends", f"more than {MAX_FILES} files extend each other"))
        return
    found: list[Problem] = []
    tree = read_file(path, name, found)
    if tree is None and named and found and found[0].where == name:
        found = [Problem(named, "extends", f"{format_value(name)}: {found[0].message}"), *found[1:]]
    problems += found
    if tree is None:
        return
    extends = tree.value.get("extends")
    parents = [] if extends is None else extends.value if isinstance(extends.value, list) else [extends]
    for parent in parents:
        if not isinstance(parent.value, str) or not parent.value:
            message = f"expected a file or a list of files; found {format_value(plain(parent))}"
            problems.append(Problem(parent.where, "extends", message))
        elif len(stack) >= MAX_FILES:
            problems.append(Problem(parent.where, "extends", f"more than {MAX_FILES} files extend each other"))
        elif "\0" in parent.value:
            problems.append(Problem(parent.where, "extends", "a file name cannot hold a NUL character"))
        else:
            _collect(find_file(parent.value, path.parent), [*stack, real], levels, problems, parent.where)
    levels.append(_level(tree, path.parent, problems))


def _overrides(texts: Iterable[str], problems: list[Problem]) -> list[tuple[list[str], Node]]:
    """Paths and values of `key=value` texts; layouts first, then types, so that their order does not matter."""
    given = []
    for text in texts:
        if not isinstance(text, str) or "=" not in text:
            hint = "" if not isinstance(text, str) else did_you_mean(text, all_keys())
            problems.append(Problem(COMMAND_LINE, "", f"expected key=value; found {format_value(str(text))}{hint}"))
            continue
        key, _, value = text.partition("=")
        path = key.strip().split(".")
        if not all(path) or len(path) > DEPTH or not key.isprintable():
            problems.append(
                Problem(COMMAND_LINE, "", f"{format_value(key)} is no key; expected e.g. optimizer.lr=1e-3")
            )
            continue
        if path[0] in FILE_KEYS:
            problems.append(Problem(COMMAND_LINE, key, "can only be said in a file"))
            continue
        found: list[Problem] = []
        node = read_text(value, COMMAND_LINE, found, lines=False)
        problems += [Problem(p.where, ".".join(filter(None, (key, p.key))), p.message) for p in found]
        if node is not None and not found:
            given.append((path, node))
    return sorted(given, key=lambda item: (item[0] != ["layout"], item[0][-1] != "type"))


def _merge(levels: list[Level], given: list[tuple[list[str], Node]], problems: list[Problem], notes: list[str]) -> Node:
    """Merges levels and overrides in order; a layout replaces the keys that layouts hold of earlier levels."""
    tree = Node({}, "default", "default")
    command_layout = next((node for path, node in reversed(given) if path == ["layout"]), None)
    if command_layout is None and not any("layout" in level.tree.value for level in levels):
        tree = _with_layout(tree, Node(Config.model_fields["layout"].default, "default", "default"), None, problems)
    for level in levels:
        layout = level.tree.value.get("layout")
        if level.resolved:
            tree = Node({k: v for k, v in tree.value.items() if k not in LAYOUT_KEYS}, tree.where, tree.origin)
        elif layout is not None:
            tree = _with_layout(tree, layout, level.folder, problems)
        tree = merge(tree, level.tree)
    folder = levels[-1].folder if levels else None
    if command_layout is not None:
        notes += _dropped(tree, command_layout)
        tree = _with_layout(tree, command_layout, folder, problems, here=True)
    defaults = Config().model_dump()
    for path, node in given:
        found: list[Problem] = []
        tree = put(tree, path, node, defaults, found)
        problems += [Problem(p.where, ".".join(path), p.message) for p in found]
    # All keys of a layout are set in a loaded config, which `Config.has_layout` tells from one built in Python.
    unset = {key: defaults[key] for key in LAYOUT_KEYS if key not in tree.value}
    return merge(from_python(unset, "default", problems), tree)


def _dropped(tree: Node, layout: Node) -> list[str]:
    """A note on the mesh sizes of files that a layout of the command line replaces."""
    mesh = find(tree, ["mesh"])
    if mesh is None or not isinstance(mesh.value, dict):
        return []
    lost = {axis: node for axis, node in mesh.value.items() if not node.origin.startswith(("layout ", "default"))}
    if not lost:
        return []
    sizes = ", ".join(f"{axis} {format_value(plain(node))}" for axis, node in lost.items())
    file = mesh.where.rpartition(":")[0]
    return [f"layout={format_value(layout.value)}: brings its own mesh; {sizes} of {file} is not used"]


def _with_imported(tree: Node, read_model: ReadModel, problems: list[Problem]) -> Node:
    """The tree on what the Hugging Face model of `model.from` says: the model, and its tokenizer."""
    source, kind, data = (find(tree, at) for at in (["model", "from"], ["model", "type"], ["data", "type"]))
    if source is None or not isinstance(source.value, str) or (kind and kind.value != "decoder"):
        return tree
    folder = Path(os.path.expanduser(source.value))
    try:
        if "\0" in source.value:
            raise UserError("a file name cannot hold a NUL character")
        model = read_model(folder)
    except UserError as error:
        problems.append(Problem(source.where, "model.from", str(error)))
        return tree
    under: dict[str, Any] = {"model": model}
    if (folder / "tokenizer.json").is_file() and (data is None or data.value == "text"):
        under["data"] = {"tokenizer": os.path.join(source.value, "tokenizer.json")}
    return merge(from_python(under, display(folder / "config.json"), problems), tree)


def _with_layout(tree: Node, layout: Node, folder: Path | None, problems: list[Problem], here: bool = False) -> Node:
    """The tree with what layouts hold replaced by a layout's own.

    Args:
        tree: the levels so far.
        layout: the node that names the layout.
        folder: folder of the file that names it.
        problems: problems are appended here.
        here: the name may also be a path from the working folder (for the command line).
    """
    name = layout.value
    if not isinstance(name, str):
        return tree  # the schema says what is wrong
    try:
        if "\0" in name:
            raise ValueError("a file name cannot hold a NUL character")
        is_file = here and name.endswith((".yaml", ".yml")) and os.path.isfile(name)
        path = Path(name) if is_file else find_layout(name, folder)
    except ValueError as error:
        problems.append(Problem(layout.where, "layout", str(error)))
        return tree
    own = read_file(path, display(path), problems)
    if own is None:
        return tree
    label = f"layout {name}"
    parts = {}
    for key, node in own.value.items():
        if key in LAYOUT_KEYS:
            parts[key] = _labelled(node, label)
        else:
            hint = did_you_mean(key, LAYOUT_KEYS)
            problems.append(Problem(node.where, key, f"a layout holds {join_words(LAYOUT_KEYS, 'and')} only{hint}"))
    kept = {key: node for key, node in tree.value.items() if key not in LAYOUT_KEYS}
    return Node({**kept, **parts}, tree.where, tree.origin)


def _labelled(node: Node, label: str) -> Node:
    """The tree with `layout NAME` as the origin of every value."""
    if isinstance(node.value, dict):
        return Node({key: _labelled(child, label) for key, child in node.value.items()}, node.where, label)
    if isinstance(node.value, list):
        return Node([_labelled(child, label) for child in node.value], node.where, label)
    return Node(node.value, node.where, label)
