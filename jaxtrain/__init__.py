"""jaxtrain: train Flax models on any device mesh from a typed config.

    import jaxtrain
    config = jaxtrain.load("configs/quickstart.yaml", "mesh.model=4")
    result = jaxtrain.train(config)

Nothing is imported before it is used, so that flags can be set before JAX starts.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.api import initialize, train
    from jaxtrain.config import Config, ConfigError

__all__ = ["Config", "ConfigError", "initialize", "load", "train"]


def load(path: str | os.PathLike[str] | None, *overrides: str, base: dict[str, Any] | None = None) -> Config:
    """Loads the config of a YAML file with `key=value` overrides, and checks values, mesh, rules and the model's dims.

    Args:
        path: YAML file, or None for the defaults.
        overrides: `key=value` texts.
        base: values under the file, above the defaults.

    Returns:
        the config, frozen and complete.

    Raises:
        ConfigError: has every problem, one line each.
    """
    from jaxtrain.core.resolve import resolve

    return resolve(path, *overrides, base=base)[0]


def __getattr__(name: str) -> Any:
    if name in ("initialize", "train"):
        return getattr(import_module("jaxtrain.api"), name)
    if name in ("Config", "ConfigError"):
        return getattr(import_module("jaxtrain.config"), name)
    raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")
