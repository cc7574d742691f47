"""Compression of the first steps of a run, where it is another one."""

from __future__ import annotations

from jaxtrain.config.sections.sync import CompressConfig


def first_phases(config: CompressConfig) -> list[tuple[int, CompressConfig]]:
    """Returns (end, compression) of the steps before those of the config itself."""
    if config.gradients == "onebit_adam":
        return [(config.freeze, CompressConfig())]
    return []
