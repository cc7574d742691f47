"""Compiler options for XLA, by its version."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

UNNAMED = "--xla_enable_hlo_sharding_v3=false"


def prepare() -> None:
    """Sets XLA_FLAGS. Has no effect once JAX has its devices.

    XLA of JAX 0.11 names mesh axes in shardings, and lists the manual axes of an outer `shard_map` before those of an
    inner one. If the mesh has them in another order (stages inside replicas), its own check that they are sorted ends
    the process. Shardings without names, as in JAX 0.10, have no such check; no option of a single program selects
    them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _jaxlib("0.11") and UNNAMED.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {UNNAMED}".strip()


def fast_compile() -> dict[str, Any]:
    """Returns options for a program on CPU devices that is compiled once and run a few times.

    Optimised code takes several times as long to compile, and XLA's newer fusion emitters twice as long as the older
    ones. JAX 0.11 has no older ones, and ends the process at an unknown option.
    """
    older = {"xla_cpu_use_fusion_emitters": False} if _jaxlib("0.10") else {}
    return {"xla_backend_optimization_level": 0, **older}


def in_place(platform: str) -> dict[str, Any]:
    """Returns options for a step that donates its state.

    On CPU devices a fusion computes the new parameters from the old moments. Without this option XLA does not see that
    it can run before the moments are overwritten, and copies them: four passes over memory, and the moments twice. On
    GPUs and TPUs there are no such copies.
    """
    has_option = platform == "cpu" and any(map(_jaxlib, ("0.10", "0.11")))
    return {"xla_cpu_copy_insertion_use_region_analysis": True} if has_option else {}


def as_flags(options: dict[str, Any]) -> str:
    """Formats options for XLA_FLAGS."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())


def _jaxlib(version: str) -> bool:
    return metadata.version("jaxlib").startswith(f"{version}.")
