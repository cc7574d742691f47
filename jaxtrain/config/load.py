"""Loading: YAML files, a layout and `key=value` overrides become one frozen `Config`.

Levels, later ones win: defaults < the Hugging Face model of `model.from` < files along `extends:` < the file <
`key=value`. A level that names a layout replaces the layout keys (`LAYOUT_KEYS`: mesh, rules ...) of all earlier levels
by those of the layout; the same keys at that level or later refine them. A file with `resolved: true` is complete: its
layout and its `from` are only names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtrain.config.key_names import all_keys
from jaxtrain.config.provenance import (
    MAX_DEPTH,
    Node,
    deepest_node,
    find_node,
    from_python,
    merge,
    set_value,
    to_python,
    without_keys,
)
from jaxtrain.config.schema import LAYOUT_KEYS, Config
from jaxtrain.config.shipped import config_names, display, find_file, find_layout
from jaxtrain.config.show import flatten
from jaxtrain.config.validate import validate, without_passwords
from jaxtrain.config.yaml_reader import read_file, read_text
from jaxtrain.errors import ConfigError, Problem, add_locations, did_you_mean, format_value, join_words

COMMAND_LINE = "command line"
MAX_FILES = 64
LENGTHS = ("epochs", "steps")  # two ways to say how long a run is
FILE_KEYS = ("extends", "resolved")  # keys that only a file may have
LATER_CHECKED = ("layout", *LAYOUT_KEYS, "model", "data", "step")  # sections that the checks of layouts read
Check = Callable[[Config], Iterable[Problem]]
Fit = Callable[[Config, dict[str, str]], Config]
ReadModel = Callable[[str], tuple[Path, dict[str, Any]]]  # path or name of a Hugging Face model -> folder, `model`
Override = tuple[list[str], Node]


@dataclass(frozen=True)
class Level:
    """One file, or the base dict: its tree without `FILE_KEYS`."""

    tree: Node
    folder: Path | None
    is_resolved: bool


def load(path: str | os.PathLike[str] | None, *overrides: str, base: dict[str, Any] | None = None) -> Config:
    """Returns the config of a file (or of the defaults, for None) with `key=value` overrides.

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
    """Loads a config with the provenance of each value.

    Args:
        path: as for `load`.
        overrides: as for `load`.
        base: as for `load`.
        paths: whether the data and the tokenizer must exist; False to look at a config of another machine.
        checks: further checks (of the layout), whose problems are reported together with all others.
        read_model: finds the folder that `model.from` names, and reads its `model` section.
        fit: fits a valid config to its devices, before the checks; may change the provenance it gets.
        notes: gets a line for each value that is not used as it is written.

    Returns:
        the Config, and dotted key -> `default`, `FILE:LINE`, `layout NAME` or `command line`.

    Raises:
        ConfigError: with every problem, one line each.
    """
    problems: list[Problem] = []
    levels: list[Level] = []
    if base is not None:
        tree = from_python(base, "base", problems)
        _read_parents(tree, None, [], levels, problems)
        levels.append(_level(tree, None, problems))
    if path is not None:
        _read_levels(find_file(os.fsdecode(path), None), [], levels, problems)
    is_readable = not problems
    tree = _merge_levels(levels, _parse_overrides(overrides, problems), problems, [] if notes is None else notes)
    tree = without_passwords(tree, problems)
    if read_model and not any(level.is_resolved for level in levels):
        tree = _with_imported_model(tree, read_model, problems)
    config, removed = validate(tree, problems, paths and is_readable)
    provenance = {key: _origin(tree, key.split(".")) for key in flatten(config)}
    has_layout = is_readable and all(problem.key != "layout" for problem in problems)
    if has_layout and not any(not key or key[0] in LATER_CHECKED for key in removed):
        config = fit(config, provenance) if fit else config
        problems += add_locations([problem for check in checks for problem in check(config)], provenance)
    if problems:
        raise ConfigError(problems)
    return config, provenance


def _origin(tree: Node, path: list[str]) -> str:
    node, existing = deepest_node(tree, path)
    return "default" if len(existing) < len(path) and isinstance(node.value, (dict, list)) else node.origin


def _level(tree: Node, folder: Path | None, problems: list[Problem]) -> Level:
    resolved = tree.value.get("resolved")
    if resolved is not None and not isinstance(resolved.value, bool):
        message = f"expected true or false; found {format_value(to_python(resolved))}"
        problems.append(Problem(resolved.where, "resolved", message))
    return Level(without_keys(tree, FILE_KEYS), folder, resolved is not None and resolved.value is True)


def _read_levels(
    file: Path, children: list[Path], levels: list[Level], problems: list[Problem], where: str = ""
) -> None:
    """Appends the levels of a file: first those of the files it extends, in order, then its own.

    Args:
        file: the file.
        children: the files that extend it, outermost first.
        levels: levels are appended here.
        problems: problems are appended here.
        where: location of the `extends` that names the file; empty for the first file.
    """
    path, name = Path(os.path.abspath(file)), display(file)
    if path in children:
        chain = " -> ".join(display(p) for p in [*children[children.index(path) :], path])
        problems.append(Problem(where, "extends", f"the files extend each other in a circle: {chain}"))
        return
    if len(levels) + len(children) >= MAX_FILES:
        problems.append(Problem(where, "extends", f"more than {MAX_FILES} files extend each other"))
        return
    count = len(problems)
    tree = read_file(file, name, problems)
    if tree is None:
        if where and problems[count].where == name:
            problems[count] = Problem(where, "extends", f"{format_value(name)}: {problems[count].message}")
        if not os.path.exists(file) and (hint := did_you_mean(os.path.splitext(file)[0], config_names())):
            problems[count] = replace(problems[count], message=problems[count].message + hint)
        return
    _read_parents(tree, file.parent, [*children, path], levels, problems)
    levels.append(_level(tree, file.parent, problems))


def _read_parents(
    tree: Node, folder: Path | None, children: list[Path], levels: list[Level], problems: list[Problem]
) -> None:
    """Appends the levels of what a tree extends: files beside it, in `folder`, or shipped ones."""
    extends = tree.value.get("extends")
    parents = [] if extends is None else extends.value if isinstance(extends.value, list) else [extends]
    for parent in parents:
        if isinstance(parent.value, str) and parent.value:
            _read_levels(find_file(parent.value, folder), children, levels, problems, parent.where)
        else:
            message = f"expected a file or a list of files; found {format_value(to_python(parent))}"
            problems.append(Problem(parent.where, "extends", message))


def _parse_overrides(texts: Iterable[str], problems: list[Problem]) -> list[Override]:
    """Parses `key=value` texts. Layouts come first, then types, so that the order of the texts does not matter."""
    overrides: list[Override] = []
    for text in texts:
        key, equals, value = text.partition("=") if isinstance(text, str) else (str(text), "", "")
        path = key.strip().split(".")
        if not equals:
            message = f"expected key=value; found {format_value(key)}{did_you_mean(key, all_keys())}"
            problems.append(Problem(COMMAND_LINE, "", message))
        elif not all(path) or len(path) > MAX_DEPTH or not key.isprintable():
            problems.append(
                Problem(COMMAND_LINE, "", f"{format_value(key)} is no key; expected e.g. optimizer.lr=1e-3")
            )
        elif path[0] in FILE_KEYS:
            problems.append(Problem(COMMAND_LINE, key, "can only be set in a file"))
        else:
            errors: list[Problem] = []
            node = read_text(value, COMMAND_LINE, errors, has_lines=False)
            problems += [Problem(p.where, ".".join(filter(None, (key, p.key))), p.message) for p in errors]
            if node is not None and not errors:
                overrides.append((path, node))
    return sorted(overrides, key=lambda item: (item[0] != ["layout"], item[0][-1] != "type"))


def _merge_levels(levels: list[Level], overrides: list[Override], problems: list[Problem], notes: list[str]) -> Node:
    """Merges levels and overrides in order. A layout replaces the `LAYOUT_KEYS` of earlier levels."""
    tree = Node({}, "default", "default")
    override = next((node for path, node in reversed(overrides) if path == ["layout"]), None)
    if override is None and not any("layout" in level.tree.value for level in levels):
        tree = _with_layout(tree, Node(Config.model_fields["layout"].default, "default", "default"), None, problems)
    for level in levels:
        layout = level.tree.value.get("layout")
        if level.is_resolved:
            tree = without_keys(tree, LAYOUT_KEYS)
        elif layout is not None:
            tree = _with_layout(tree, layout, level.folder, problems)
        tree = merge(_without_other_length(tree, level.tree.value), level.tree)
    if override is not None:
        notes += _replaced_sizes(tree, override)
        tree = _with_layout(tree, override, levels[-1].folder if levels else None, problems)
    defaults = Config().model_dump()
    tree = _without_other_length(tree, {path[0] for path, _ in overrides})
    for path, node in overrides:
        errors: list[Problem] = []
        notes += _dropped_options(tree, path, node)
        tree = set_value(tree, path, node, defaults, errors)
        problems += [Problem(p.where, ".".join(path), p.message) for p in errors]
    # All keys of a layout are set in a loaded config, which `Config.has_layout` tells from one built in Python.
    unset = {key: defaults[key] for key in LAYOUT_KEYS if key not in tree.value}
    return merge(from_python(unset, "default", problems), tree)


def _without_other_length(tree: Node, given: Collection[str]) -> Node:
    """Returns the tree without `steps` if a later level gives `epochs`, and the reverse: the later one counts."""
    other = {"epochs": "steps", "steps": "epochs"}
    return without_keys(tree, [other[key] for key in LENGTHS if key in given and other[key] not in given])


def _dropped_options(tree: Node, path: Sequence[str], node: Node) -> list[str]:
    """Returns a note on the options of a section whose `type` the command line replaces."""
    section = find_node(tree, path[:-1]) if path[-1] == "type" else None
    if section is None or not isinstance(section.value, dict):
        return []
    before, options = section.value.get("type"), section.value.get("options")
    if options is None or not options.value or (before is not None and before.value == node.value):
        return []
    key = ".".join(path[:-1])
    return [f"{key}.type={node.value} has its own options: {key}.options of {options.where} are not used"]


def _replaced_sizes(tree: Node, layout: Node) -> list[str]:
    """Returns a note on the mesh sizes of files that a layout of the command line replaces."""
    mesh = find_node(tree, ["mesh"])
    nodes = mesh.value.items() if mesh is not None and isinstance(mesh.value, dict) else ()
    sizes = [
        (axis, node) for axis, node in nodes
        if not node.origin.startswith(("layout ", "default")) and to_python(node) not in (1, {})
    ]  # fmt: skip
    if mesh is None or not sizes:
        return []
    text = ", ".join(f"{axis} {format_value(to_python(node))}" for axis, node in sizes)
    return [f"layout {layout.value} has its own mesh: {text} of {mesh.where.rpartition(':')[0]} is not used"]


def _with_imported_model(tree: Node, read_model: ReadModel, problems: list[Problem]) -> Node:
    """Returns the tree merged onto the model, and the tokenizer, of the Hugging Face folder in `model.from`."""
    source, model_type, data_type = (
        find_node(tree, at) for at in (["model", "from"], ["model", "type"], ["data", "type"])
    )
    if source is None or not isinstance(source.value, str) or (model_type and model_type.value != "decoder"):
        return tree
    try:
        folder, section = read_model(source.value)
    except ValueError as error:
        problems.append(Problem(source.where, "model.from", str(error)))
        return tree
    under: dict[str, Any] = {"model": section}
    if (folder / "tokenizer.json").is_file() and (data_type is None or data_type.value == "text"):
        under["data"] = {"tokenizer": str(folder / "tokenizer.json")}
    found = set_value(tree, ["model", "from"], Node(str(folder), source.where, source.origin), {}, problems)
    return merge(from_python(under, display(folder / "config.json"), problems), found)


def _with_layout(tree: Node, layout: Node, folder: Path | None, problems: list[Problem]) -> Node:
    """Returns the tree with its `LAYOUT_KEYS` replaced by those of a layout.

    Args:
        tree: the levels so far.
        layout: the node that names the layout; on the command line it may be a path from the working folder too.
        folder: folder of the file that names it.
        problems: problems are appended here.
    """
    name = layout.value
    if not isinstance(name, str):
        return tree  # validation reports it
    try:
        is_file = layout.where == COMMAND_LINE and name.endswith((".yaml", ".yml")) and os.path.isfile(name)
        path = Path(name) if is_file else find_layout(name, folder)
    except ValueError as error:
        problems.append(Problem(layout.where, "layout", str(error)))
        return tree
    content = read_file(path, display(path), problems, origin=f"layout {name}")
    if content is None:
        return tree
    for key, node in content.value.items():
        if key not in LAYOUT_KEYS:
            message = f"a layout has {join_words(LAYOUT_KEYS, 'and')} only{did_you_mean(key, LAYOUT_KEYS)}"
            problems.append(Problem(node.where, key, message))
    replaced = {key: node for key, node in content.value.items() if key in LAYOUT_KEYS}
    return Node({**without_keys(tree, LAYOUT_KEYS).value, **replaced}, tree.where, tree.origin)
