"""Errors of the data room, and lazy imports of its optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from jaxtrain.config.errors import UserError


class DataError(UserError):
    """Bad input data. One line: what is wrong, in which file, what would be right."""


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
