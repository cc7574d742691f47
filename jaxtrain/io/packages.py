"""Installed packages: versions, and imports of optional ones."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from jaxtrain.errors import DataError


def version(package: str) -> str:
    """Returns the version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def require(module: str, purpose: str, extra: str = "data") -> Any:
    """Import an optional package of an extra.

    Raises:
      DataError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(f"{purpose} needs the package {package}: pip install 'jaxtrain[{extra}]'") from error
