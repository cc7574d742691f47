"""Compiler options for XLA, by its version."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

UNNAMED = "--xla_enable_hlo_sharding_v3=false"


def prepare() -> None:
    """Sets XLA_FLAGS. Has no effect after JAX has looked for devices.

    XLA of JAX 0.11 writes shardings by the names of mesh axes, and lists the manual axes of an outer `shard_map` before
    those of an inner one. Where the mesh has them the other way round (stages inside of replicas) a check of its own,
    that they are sorted, ends the process. Shardings without names, those of JAX 0.10, have no such check; no option of
    a single program chooses them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _jaxlib("0.11") and UNNAMED.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {UNNAMED}".strip()


def quickly() -> dict[str, Any]:
    """Options for a program of CPU devices that is compiled once and run a few times.

    Optimised code would take several times as long to compile, and XLA's newer emitters of fusions twice as long as its
    older ones. JAX 0.11 has no older ones, and ends the process at an option that it does not know.
    """
    older = {"xla_cpu_use_fusion_emitters": False} if _jaxlib("0.10") else {}
    return {"xla_backend_optimization_level": 0, **older}


def in_place(platform: str) -> dict[str, Any]:
    """Options for a step that is given its state to keep.

    On CPU devices the new parameters are computed from the old moments, in a fusion of their own, and XLA, which by
    itself does not see that this can come before the moments are overwritten, copies them: four passes over memory
    and the moments twice. On GPUs and TPUs there are no such copies.
    """
    known = platform == "cpu" and any(map(_jaxlib, ("0.10", "0.11")))
    return {"xla_cpu_copy_insertion_use_region_analysis": True} if known else {}


def as_flags(options: dict[str, Any]) -> str:
    """Formats options for XLA_FLAGS."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())


def _jaxlib(version: str) -> bool:
    return metadata.version("jaxlib").startswith(f"{version}.")
