"""Compiler options for XLA, by its version."""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import jaxlib

UNNAMED = "--xla_enable_hlo_sharding_v3=false"
OVERLAPPED = 4  # collectives that may run at once


def prepare() -> None:
    """Sets XLA_FLAGS. Has no effect once JAX has its devices.

    XLA since JAX 0.11 names mesh axes in shardings, and lists the manual axes of an outer `shard_map` before those of
    an inner one. If the mesh has them in another order (stages inside replicas), its own check that they are sorted
    ends the process. Shardings without names, as in JAX 0.10, have no such check; no option of a single program
    selects them.
    """
    flags, option = os.environ.get("XLA_FLAGS", ""), UNNAMED.partition("=")[0]
    if _jaxlib() >= (0, 11) and option not in flags and _library_names(option.strip("-")):
        os.environ["XLA_FLAGS"] = f"{flags} {UNNAMED}".strip()


def fast_compile() -> dict[str, Any]:
    """Returns options for a program on CPU devices that is compiled once and run a few times.

    Optimised code takes several times as long to compile, and XLA's newer fusion emitters twice as long as the older
    ones. JAX 0.11 has no older ones, and ends the process at an unknown option.
    """
    older = {"xla_cpu_use_fusion_emitters": False} if _jaxlib() < (0, 11) else {}
    return {"xla_backend_optimization_level": 0, **older}


def in_place(platform: str) -> dict[str, Any]:
    """Returns options for a step that donates its state.

    On CPU devices a fusion computes the new parameters from the old moments. Without this option XLA does not see that
    it can run before the moments are overwritten, and copies them: four passes over memory, and the moments twice. On
    GPUs and TPUs there are no such copies.
    """
    name = "xla_cpu_copy_insertion_use_region_analysis"
    return {name: True} if platform == "cpu" and _is_known(name) else {}


def overlapped(platform: str) -> dict[str, Any]:
    """Returns options for a step during which replicas send one another what the step does not depend on.

    XLA lets one collective run at a time on GPUs, so that what travels over a slow network would wait for those of the
    step, and they for it. It also starts a collective only as long before its result is needed as it takes by its
    estimate, which knows no slow network.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    options = {
        "xla_gpu_experimental_parallel_collective_overlap_limit": OVERLAPPED,
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    }
    return {name: value for name, value in options.items() if _is_known(name, value)}


def as_flags(options: dict[str, Any]) -> str:
    """Formats options for XLA_FLAGS."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())


@cache
def _is_known(option: str, value: Any = True) -> bool:
    """Returns whether this version of XLA takes an option of a program with a value of this type."""
    import jax  # later than `prepare`: JAX reads the environment when it is imported

    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _jaxlib() -> tuple[int, ...]:
    """Returns the version of jaxlib as far as the second number."""
    return tuple(map(int, metadata.version("jaxlib").split(".")[:2]))


def _library_names(option: str) -> bool:
    """Looks for an option in XLA's library: a version that does not know one in XLA_FLAGS ends the process."""
    library = Path(jaxlib.__file__).with_name("libjax_common.so")
    if not library.exists():
        return False
    with library.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        return content.find(option.encode()) >= 0
