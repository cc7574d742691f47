"""Loads a config and runs every check on it: the one entry for commands, `train`, `plan` and `verify`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxtrain.config import load
from jaxtrain.config.schema import Config
from jaxtrain.interop import config_json
from jaxtrain.models.layout_check import check_config
from jaxtrain.pipeline.check import check_pipeline


def resolve(
    path: str | os.PathLike[str] | None,
    *overrides: str,
    base: dict[str, Any] | None = None,
    paths: bool = True,
    checks: Iterable[load.Check] = (check_config, check_pipeline),
) -> tuple[Config, dict[str, str]]:
    """Loads a config with its layout, and checks values, mesh, rules, the model's dims and the pipeline schedule.

    Args:
        path: YAML file, relative to the working folder, or a shipped one such as `configs/quickstart.yaml`; None for
            the defaults.
        overrides: `key=value` texts, e.g. `"mesh.model=4"`; values are YAML.
        base: values under the file, above the defaults.
        paths: if True, the data and the tokenizer must exist; False to look at a config of another machine.
        checks: checks of the layout, the model and the schedule.

    Returns:
        the Config, and dotted key -> `default`, `FILE:LINE`, `layout NAME` or `command line`.

    Raises:
        ConfigError: with every problem, one line each.
    """
    return load.resolve(path, *overrides, base=base, paths=paths, checks=checks, read_model=_read_model)


def _read_model(folder: Path) -> dict[str, Any]:
    """The `model` section of a Hugging Face folder."""
    return config_json.opened(folder)[1]
