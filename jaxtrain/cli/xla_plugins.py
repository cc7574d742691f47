"""Keeps JAX from loading compilers for absent devices as if the devices were here. No JAX here.

The packages that compile for a TPU or GPU are those that run on one. Loaded where there is none, they complain for
pages and look for one over the network.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

GOOGLE = "0x1ae0"  # PCI vendor, by which JAX too looks for TPUs
DEVICES = Path("/sys/bus/pci/devices")


def set_aside() -> None:
    """To be called before JAX is imported: to it, a plugin whose devices are not here is not installed."""
    hidden: dict[str, Any] = sys.modules  # to Python None is a module that cannot be imported
    if not has_tpu():
        hidden.setdefault("libtpu", None)
        os.environ.pop("TPU_LIBRARY_PATH", None)  # libtpu's import sets it, for all children of the importing process
    if not has_nvidia_driver():
        quiet: Any = ModuleType("jax_plugins.xla_cuda13")
        quiet.initialize = lambda: None
        hidden.setdefault(quiet.__name__, quiet)
        hidden.setdefault("jax_cuda13_plugin", None)


def has_nvidia_driver() -> bool:
    """Whether there is what JAX needs to find a GPU of NVIDIA at all, in containers and WSL too."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_tpu(devices: Path = DEVICES) -> bool:
    """Whether there may be a TPU: a device of Google's on the PCI bus, or the user says that there is one."""
    if "JAX_FORCE_TPU_INIT" in os.environ or "tpu" in os.environ.get("JAX_PLATFORMS", ""):
        return True
    return any(vendor.read_text().strip() == GOOGLE for vendor in devices.glob("*/vendor"))
