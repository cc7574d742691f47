"""Loads a config and runs every check on it: the one entry for commands, `train`, `plan` and `verify`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import load
from jaxtrain.config.checks import config_notes
from jaxtrain.config.schema import Config
from jaxtrain.core.mesh_fit import changes, fit_mesh
from jaxtrain.interop import config_json
from jaxtrain.models.layout_check import check_config
from jaxtrain.pipeline.check import check_pipeline
from jaxtrain.sharding.axes import AXES


def resolve(
    path: str | os.PathLike[str] | None,
    *overrides: str,
    base: dict[str, Any] | None = None,
    paths: bool = True,
    checks: Iterable[load.Check] = (check_config, check_pipeline),
    notes: list[str] | None = None,
) -> tuple[Config, dict[str, str]]:
    """Loads a config with its layout, and checks values, mesh, rules, the model's dims and the pipeline schedule.

    Args:
        path: YAML file, relative to the working folder, or a shipped one such as `configs/quickstart.yaml`; None for
            the defaults.
        overrides: `key=value` texts, e.g. `"mesh.model=4"`; values are YAML.
        base: values under the file, above the defaults.
        paths: if True, the data and the tokenizer must exist; False to look at a config of another machine.
        checks: checks of the layout, the model and the schedule.
        notes: gets a line for each value that is not used as it is written.

    Returns:
        the Config, and dotted key -> `default`, `FILE:LINE`, `layout NAME` or `command line`.

    Raises:
        ConfigError: with every problem, one line each.
    """
    said: list[str] = [] if notes is None else notes

    def fit(config: Config, provenance: dict[str, str]) -> Config:
        return _fit(config, provenance, said)

    result = load.resolve(
        path, *overrides, base=base, paths=paths, checks=checks, read_model=_read_model, fit=fit, notes=said
    )
    said += config_notes(result[0])
    return result


def with_layout(config: Config, paths: bool = True) -> Config:
    """Returns a config that was built in Python with its layout applied and all checks made; a loaded one as it is.

    Args:
        config: loaded, or built in Python.
        paths: if True, the data and the tokenizer must exist.

    Raises:
        ConfigError: with every problem, one line each.
    """
    if config.has_layout:
        return config
    return resolve(None, base=config.model_dump(mode="json", exclude_unset=True), paths=paths)[0]


def _fit(config: Config, provenance: dict[str, str], notes: list[str]) -> Config:
    """Fits the mesh to the simulated devices, see `core.mesh_fit`."""
    if config.simulate is None:
        return config
    fixed = {axis for axis in AXES if provenance.get(f"mesh.{axis}") == load.COMMAND_LINE}
    is_asked = load.COMMAND_LINE in (provenance.get("simulate"), provenance.get("layout"))
    new = fit_mesh(config, config.simulate, fixed, is_asked, check_config)
    if new.mesh != config.mesh:
        notes.append(f"mesh: {changes(config, new)} on {config.simulate} devices")
        provenance |= {f"mesh.{axis}": f"fitted to {config.simulate} devices" for axis in _changed(config, new)}
    return new


def _changed(old: Config, new: Config) -> Mapping[str, None]:
    return dict.fromkeys(axis for axis in AXES if getattr(old.mesh, axis) != getattr(new.mesh, axis))


def _read_model(folder: Path) -> dict[str, Any]:
    """The `model` section of a Hugging Face folder."""
    return config_json.read_model_config(folder)[1]
