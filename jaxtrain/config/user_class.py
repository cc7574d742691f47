"""Users' own classes by name: `package.module:Class`, or a name that an installed package adds as an entry point."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal

from jaxtrain.errors import UserError, describe_error, did_you_mean, format_value, join_words

USER_CLASS = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"  # "package.module:Class"
Kind = Literal["models", "optimizers", "callbacks", "trackers", "data", "strategies"]


def installed_names(kind: Kind) -> dict[str, str]:
    """Returns the names that installed packages add: name -> `package.module:Class`.

    They are entry points of the group `jaxtrain.KIND`.
    """
    return {point.name: point.value for point in metadata.entry_points(group=f"jaxtrain.{kind}")}


def is_reference(text: str, kind: Kind) -> bool:
    """Returns whether a text is `package.module:Class`, or a name that an installed package adds."""
    return re.fullmatch(USER_CLASS, text) is not None or (":" not in text and text in installed_names(kind))


def names_hint(text: str, kind: Kind, builtin: list[str]) -> str:
    """Returns the installed names of a kind, and the nearest name, to end an error message."""
    installed = sorted(installed_names(kind))
    listed = f"; installed packages add {join_words(installed, 'and')}" if installed else ""
    return listed + did_you_mean(text, [*builtin, *installed])


def make_object(
    where: str, reference: str, options: Mapping[str, Any], kind: Kind, defaults: Mapping[str, Any] | None = None
) -> Any:
    """Calls the class or function of a reference.

    Args:
        where: section of the config, for messages.
        reference: `package.module:Class`, or a name that an installed package adds.
        options: keyword arguments.
        kind: what it is.
        defaults: keyword arguments for a class that takes them, if the options do not have them.

    Raises:
        UserError: no such class, or it fails.
    """
    return call(where, load_class(reference, f"{where}.type", kind), reference, options, defaults)


def call(
    where: str, make: Any, name: str, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Any:
    """Calls a class or function with options, and with those of the defaults that it takes.

    Raises:
        UserError: it fails.
    """
    try:
        taken = inspect.signature(make).parameters
        return make(**{key: value for key, value in (defaults or {}).items() if key in taken} | dict(options))
    except Exception as error:
        raise UserError(f"{where}.options: {name} fails: {describe_error(error)}") from error


def load_class(reference: str, where: str, kind: Kind | None = None) -> Any:
    """Imports the module of a class and returns the class.

    Args:
        reference: `package.module:Class`, or a name that an installed package adds.
        where: config key of the reference, for messages.
        kind: what it is, if packages may add it.

    Raises:
        UserError: `reference` has another form, the module does not exist, or it has no such class.
        Exception: any error of the user's module during its import, unchanged and with its traceback.
    """
    if kind is not None and ":" not in reference:
        reference = installed_names(kind).get(reference, reference)
    if not re.fullmatch(USER_CLASS, reference) or "" in reference.partition(":")[0].split("."):
        raise UserError(f"{where}: expected a class as `package.module:Class`; found {format_value(reference)}")
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not _is_part(error.name, module_name):  # it is a module that the user's module imports
            raise
        message = f"no module `{error.name}`; put its folder on PYTHONPATH, or run from it"
        raise UserError(f"{where}: {reference}: {message}") from error
    try:
        cls = getattr(module, name)
    except AttributeError as error:
        classes = [n for n, value in vars(module).items() if isinstance(value, type)]
        message = f"module `{module_name}` has no `{name}`{did_you_mean(name, classes)}"
        raise UserError(f"{where}: {reference}: {message}; it was read from {_file(module)}") from error
    if not callable(cls):
        message = f"`{name}` of module `{module_name}` is no class, but {type(cls).__name__}"
        raise UserError(f"{where}: {reference}: {message}")
    return cls


def _is_part(missing: str | None, module: str) -> bool:
    """Returns whether the missing module is `module` or one of its parent packages."""
    return missing is not None and (module == missing or module.startswith(missing + "."))


def _file(module: Any) -> str:
    return getattr(module, "__file__", None) or "a folder without __init__.py"
