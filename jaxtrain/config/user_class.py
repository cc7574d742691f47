"""Import of a user's own class by name: `package.module:Class`."""

from __future__ import annotations

import importlib
import re
from typing import Any

from jaxtrain.config.schema import USER_CLASS
from jaxtrain.errors import UserError, did_you_mean, format_value


def load_class(reference: str, where: str) -> Any:
    """Imports the module of a class and returns the class.

    Args:
        reference: `package.module:Class`.
        where: config key of the reference, for messages.

    Raises:
        UserError: `reference` has another form, the module does not exist, or it has no such class.
        Exception: any error of the user's module during its import, unchanged and with its traceback.
    """
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
