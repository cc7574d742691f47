"""Loads a config and runs every check on it: the one entry for commands, `train`, `plan` and `verify`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrain.config import load
from jaxtrain.config.checks import config_notes
from jaxtrain.config.schema import Config
from jaxtrain.config.show import flatten
from jaxtrain.core.layout_check import check_config, check_layout
from jaxtrain.core.mesh_fit import describe_change, fit_mesh, mesh_sizes, unused_axes, with_sizes
from jaxtrain.interop import config_json
from jaxtrain.interop.hub import model_folder
from jaxtrain.sharding.axes import AXES, shape_text

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None


def resolve(
    path: str | os.PathLike[str] | None,
    *overrides: str,
    base: dict[str, Any] | None = None,
    paths: bool = True,
    checks: Iterable[load.Check] = (check_layout,),
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
    notes = [] if notes is None else notes
    config, provenance = load.resolve(
        path, *overrides, base=base, paths=paths, checks=checks, read_model=partial(_read_model, weights=paths),
        fit=partial(_fit, notes=notes), notes=notes,
    )  # fmt: skip
    notes += config_notes(config)
    return config, provenance


def load_config(
    source: ConfigSource, *overrides: str, paths: bool = True, checks: Iterable[load.Check] = (check_layout,),
    **keys: Any,
) -> Config:  # fmt: skip
    """Loads a config from Python.

    Args:
        source: path of a YAML file, name of a shipped config such as `quickstart`, dict of sections, `Config`, or None
            for the defaults.
        overrides: `key=value` texts.
        paths: as for `resolve`.
        checks: as for `resolve`.
        keys: sections or keys, such as `layout="fsdp"` or `mesh={"fsdp": 4}`; as overrides.

    Returns:
        the config, frozen and complete.

    Raises:
        ConfigError: with every problem, one line each.
    """
    return load_with_sources(source, *overrides, paths=paths, checks=checks, **keys)[0]


def load_with_sources(
    source: ConfigSource, *overrides: str, paths: bool = True, checks: Iterable[load.Check] = (check_layout,),
    notes: list[str] | None = None, **keys: Any,
) -> tuple[Config, dict[str, str]]:  # fmt: skip
    """Returns the config of `load_config`, and the source of each value as `resolve` does; `notes` is its argument."""
    texts = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in _flat(keys))]
    options: dict[str, Any] = {"paths": paths, "checks": checks, "notes": notes}
    if isinstance(source, Config):
        if not texts:
            return source, dict.fromkeys(flatten(source), "Config")
        base = source.model_dump(mode="json", exclude_unset=not source.has_layout) | {"resolved": source.has_layout}
        return resolve(None, *texts, base=base, **options)
    if source is None or isinstance(source, Mapping):
        return resolve(None, *texts, base=None if source is None else dict(source), **options)
    return resolve(source, *texts, **options)


def _flat(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values; an empty dict, and one of options or rules, is a value."""
    for key, value in keys.items():
        if isinstance(value, Mapping) and value and key not in ("options", "rules"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    """Fits the mesh to the simulated devices, see `core.mesh_fit`. Adds a note on each change."""
    given = {key for key, origin in provenance.items() if origin == load.COMMAND_LINE}
    fixed = {axis for axis in AXES if f"mesh.{axis}" in given}
    unused = unused_axes(config, fixed)
    new = with_sizes(config, dict.fromkeys(unused, 1))
    if unused:
        notes.append(f"mesh: layout {config.layout} does not use {shape_text(unused).replace(' x ', ', ')}")
    if config.simulate is not None:
        may_shrink = bool(unused or fixed or given & {"simulate", "layout"})
        fitted = fit_mesh(new, config.simulate, fixed, may_shrink, check_config)
        if fitted.mesh != new.mesh:
            notes.append(describe_change(new, fitted, config.simulate))
        new = fitted
    if new.context_parallel != config.context_parallel:
        notes.append(f"context_parallel: {config.context_parallel} becomes auto; the mesh does not shard sequences")
        provenance["context_parallel"] = "fitted to the mesh"
    provenance |= {
        f"mesh.{axis}": "fitted to the devices" for axis in AXES if mesh_sizes(new)[axis] != mesh_sizes(config)[axis]
    }
    return new


def _read_model(name: str, weights: bool) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of a Hugging Face model and its `model` section."""
    folder = model_folder(name, weights)
    return folder, config_json.read_model_config(folder)[1]
