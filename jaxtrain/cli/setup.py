"""Steps that commands share before they import JAX."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.core.resolve import resolve

GOOGLE = "0x1ae0"  # PCI vendor id; JAX looks for TPUs by it too
DEVICES = Path("/sys/bus/pci/devices")


def config_overrides(args: argparse.Namespace) -> list[str]:
    """Returns the `key=value` arguments, and `--simulate` as one of them."""
    return [*args.overrides, *([] if args.simulate is None else [f"simulate={args.simulate}"])]


def load_config(path: str | Path, overrides: list[str], *, paths: bool = True) -> tuple[Config, dict[str, str]]:
    """Loads a config with all checks and prints its notes on stderr. Returns (config, provenance)."""
    notes: list[str] = []
    result = resolve(path, *overrides, paths=paths, notes=notes)
    for note in notes:
        print(f"note  {note}", file=sys.stderr)
    return result


def prepare_jax_import(simulate: int | None) -> None:
    """Sets the environment that JAX reads at import. Call it before JAX is imported.

    Args:
        simulate: number of simulated CPU devices, None or 0 for real devices.
    """
    if simulate:
        os.environ["JAX_PLATFORMS"] = "cpu"  # JAX does not look for a TPU or GPU then
    hide_absent_plugins()
    sys.path.append(os.getcwd())  # for a user's own `package.module:Class`


def hide_absent_plugins() -> None:
    """Makes XLA plugins of devices that this machine does not have look uninstalled.

    The packages that compile for a TPU or GPU also run on one. Without the device they log pages of warnings and search
    for one over the network.
    """
    hidden: dict[str, Any] = sys.modules  # a module that is None here cannot be imported
    if not has_tpu():
        hidden.setdefault("libtpu", None)
        os.environ.pop("TPU_LIBRARY_PATH", None)  # importing libtpu sets it, also for child processes
    if not has_nvidia_driver():
        quiet: Any = ModuleType("jax_plugins.xla_cuda13")
        quiet.initialize = lambda: None
        hidden.setdefault(quiet.__name__, quiet)
        hidden.setdefault("jax_cuda13_plugin", None)


def has_nvidia_driver() -> bool:
    """Returns whether the NVIDIA driver library loads, which JAX needs to find a GPU (also in containers and WSL)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_tpu(devices: Path = DEVICES) -> bool:
    """Returns whether a TPU may be present: a Google device on the PCI bus, or an environment variable names TPUs."""
    if "JAX_FORCE_TPU_INIT" in os.environ or "tpu" in os.environ.get("JAX_PLATFORMS", ""):
        return True
    return any(vendor.read_text().strip() == GOOGLE for vendor in devices.glob("*/vendor"))
