"""Starts JAX the way a config asks for: simulated devices, compilation cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jaxtrain.config.schema import Config


def start(config: Config) -> list[Any]:
    """Devices of this run.

    Raises:
        ValueError: JAX runs already, with other devices than `simulate` asks for.
    """
    if config.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compile_cache).expanduser()))
    if config.simulate is not None:
        _simulate(config.simulate)
    return jax.devices()


def _simulate(count: int) -> None:
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX runs already: what counts is the devices it has, checked below.
    devices = jax.devices()
    if devices[0].platform != "cpu" or len(devices) != count:
        raise ValueError(
            f"simulate: JAX runs already with {len(devices)} {devices[0].platform} devices, not {count} "
            "simulated ones; set simulate before anything else uses JAX"
        )
