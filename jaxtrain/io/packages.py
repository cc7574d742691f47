"""Versions and imports of installed packages."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from jaxtrain.errors import DataError


def installed_version(package: str) -> str:
    """Returns the version of a package, or an empty string if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def import_optional(module: str, purpose: str, extra: str = "data") -> Any:
    """Imports a module of an optional dependency.

    Args:
      module: dotted name.
      purpose: beginning of the error message: what needs the package.
      extra: the extra of jaxtrain that installs it.

    Raises:
      DataError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(f"{purpose} needs the package {package}: pip install 'jaxtrain[{extra}]'") from error
