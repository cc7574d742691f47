"""Targets: hardware to compile for, present or not. Does not import JAX at import: its environment is set first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from jaxtrain.core import xla_options
from jaxtrain.errors import UserError, did_you_mean, join_words
from jaxtrain.io.packages import installed_version
from jaxtrain.planning.hardware.chips import CHIPS, GPUS, TPUS, Chip, Switch, Torus

# XLA's GpuTargetConfig in text form, with NVIDIA's public device properties.
_GPU_CONFIG = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core} threads_per_core_limit: 2048 core_count: {core_count}
  fpus_per_core: {fpus_per_core} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache_size} clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {memory} shared_memory_per_block_optin: {shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""
SIMULATED = ("simulate", "cpu")  # synonyms
SHAPES = "h100:NODESxGPUS, v5p:4x4x4, simulate:8 or local"
TOOLKIT = Path(__file__).parent / "toolkit"  # replaces the CUDA toolkit, since compiled programs are not run


@dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Args:
        kind: a key of `chips.CHIPS`, `simulate` or `cpu` (CPU devices of this machine), or `local` (JAX's devices).
        shape: (nodes, GPUs per node), the torus of a slice, (devices,), or () for `local`.
        slices: TPU slices, connected by the data center's network.
    """

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def platform(self) -> str:
        """`cuda`, `tpu`, `cpu` or `local`."""
        kinds = {"cuda": GPUS, "tpu": TPUS, "cpu": SIMULATED}
        return next((platform for platform, names in kinds.items() if self.kind in names), "local")

    @property
    def chip(self) -> Chip | None:
        """Chip of the target; None for a CPU, and for `local`, whose devices only JAX knows."""
        return CHIPS.get(self.kind)

    @property
    def devices(self) -> int | None:
        """Number of JAX devices; None for `local`."""
        if self.platform == "local":
            return None
        return prod(self.shape) * self.slices * (self.chip.devices if self.chip else 1)

    def __str__(self) -> str:
        shape = ":" + "x".join(map(str, self.shape)) if self.shape else ""
        return f"{self.kind}{shape}" + (f"*{self.slices}" if self.slices > 1 else "")


def parse(text: str, slices: int | None = None) -> Target:
    """Parses a target.

    Args:
        text: `h100:64x8` (64 nodes of 8), `h100:8` (one node), `v5p:8x8x8`, `v5p:4x4x4*2` (2 slices), `simulate:8` or
            `local`.
        slices: number of TPU slices, as an alternative to `*2`.

    Raises:
        UserError: an unknown kind, or a shape that does not exist for it.
    """
    kind, colon, rest = text.strip().lower().partition(":")
    shape, star, count = rest.partition("*")
    kinds = (*CHIPS, *SIMULATED, "local")
    if kind not in kinds:
        raise UserError(
            f"target {text}: no such device{did_you_mean(kind, kinds)}; expected one of {join_words(kinds)}"
        )
    number = r"[1-9]\d*"
    if (colon and not re.fullmatch(f"{number}(x{number})*", shape)) or (star and not re.fullmatch(number, count)):
        raise UserError(f"target {text}: expected a shape such as {SHAPES}")
    if slices is not None and slices < 1:
        raise UserError(f"target {text}: {slices} slices; expected 1 or more")
    if star and slices not in (None, int(count)):
        raise UserError(f"target {text}: has {count} slices, but --slices is {slices}; expected one of the two")
    total = int(count) if star else slices or 1
    if total > 1 and kind not in TPUS:
        raise UserError(f"target {text}: only TPUs have slices; expected e.g. h100:NODESxGPUS, or v5p:4x4x4*{total}")
    return Target(kind, _parse_shape(text, kind, shape), total)


def _parse_shape(text: str, kind: str, shape: str) -> tuple[int, ...]:
    """Parses the shape of a target and checks that it exists for its kind."""
    if kind == "local":
        if shape:
            raise UserError(f"target {text}: local has no shape; expected `local`")
        return ()
    sizes = tuple(int(size) for size in (shape or "1").split("x"))
    if kind in GPUS and len(sizes) == 1:
        sizes = (1, *sizes)
    network = CHIPS[kind].inside if kind in CHIPS else None
    dims = network.dims if isinstance(network, Torus) else 2 if kind in GPUS else 1
    if len(sizes) != dims:
        example = "v6e:4x4" if dims == 2 and kind in TPUS else SHAPES
        raise UserError(f"target {text}: {kind} has {dims} sizes, not {len(sizes)}; expected e.g. {example}")
    if isinstance(network, Torus) and prod(sizes) > network.largest:
        raise UserError(f"target {text}: {prod(sizes)} chips; the largest slice of {kind} has {network.largest}")
    if isinstance(network, Torus) and not network.is_slice(sizes):
        raise UserError(f"target {text}: no slice of {kind} has this shape; expected {network.slice_shapes}")
    if isinstance(network, Switch) and sizes[1] > network.size:
        example = f"{kind}:{-(-prod(sizes) // network.size)}x{network.size}"
        raise UserError(f"target {text}: a node of {kind} has at most {network.size} GPUs; expected e.g. {example}")
    return sizes


def environment(target: Target) -> dict[str, str]:
    """Environment variables of a process that compiles for a target; they must be set before JAX starts."""
    if target.platform == "local":
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # leaves the memory of a GPU to other processes
    out = {"JAX_PLATFORMS": "cpu"}  # does not occupy or wait for the devices of this machine
    if target.platform == "cuda":
        out["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # skips CUDA libraries that only running needs
        out["CUDA_ROOT"] = str(TOOLKIT)
    elif target.platform == "tpu":
        # Does not search for a TPU host; several processes may compile at the same time.
        out |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    else:
        out["JAX_NUM_CPU_DEVICES"] = str(target.shape[0])
    return out


def missing_packages(target: Target, attention: str = "auto") -> str | None:
    """Describes the packages to install before compiling for a target, in one line; None if none is missing.

    Args:
        target: to compile for.
        attention: kernel (`step.attention`); cuDNN's compiles against the library.
    """
    cudnn = ["nvidia-cudnn-cu13"] if attention in ("auto", "cudnn") else []
    extra, needs = {
        "cuda": ("plan-gpu", ["jax-cuda13-plugin", *cudnn]),
        "tpu": ("plan-tpu", ["libtpu"]),
    }.get(target.platform, ("", []))
    absent = [package for package in needs if not installed_version(package)]
    if absent:
        return f"target {target}: compiling for it needs {join_words(absent, 'and')}; pip install 'jaxtrain[{extra}]'"
    if target.platform == "tpu" and (problem := _libtpu_mismatch()):
        return f"target {target}: {problem}; pip install 'jaxtrain[{extra}]'"
    return None


def _libtpu_mismatch() -> str | None:
    """Describes a libtpu of another version than JAX requires: JAX can not read all programs of a newer one."""
    required = [re.match(r"libtpu==([\d.]+)\.\*", line) for line in metadata.requires("jax") or ()]
    installed = metadata.version("libtpu")
    for match in filter(None, required):
        if not f"{installed}.".startswith(f"{match[1]}."):
            return f"libtpu {installed} is not the one of jax {metadata.version('jax')}, {match[1]}"
    return None


def devices(text: str, attention: str = "auto") -> list[Any]:
    """Returns devices to compile for, present or not. The process must run with `environment(target)`.

    Args:
        text: a target, such as `h100:2x8` or `v5p:4x4x4*2`.
        attention: kernel that the program uses (`step.attention`).

    Raises:
        UserError: an unknown target, or a package is not installed.
    """
    target = parse(text)
    if problem := missing_packages(target, attention):
        raise UserError(problem)
    xla_options.prepare()
    import jax

    if target.platform == "local":
        return list(jax.devices())
    if target.platform == "cpu":
        return list(jax.devices("cpu")[: target.shape[0]])
    return _tpus(target) if target.platform == "tpu" else _gpus(target)


def _tpus(target: Target) -> list[Any]:
    """One device per chip, two on TPU v7. JAX merges the two cores of a v4 chip (`megacore`)."""
    from jax.experimental import topologies

    name = f"{target.kind}:{'x'.join(map(str, target.shape))}"
    options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
    if target.kind == "v4":
        options["chip_config_name"] = "megacore"
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


def _gpus(target: Target) -> list[Any]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental import topologies

    # JAX checks whether the GPU of this machine, not the target, supports packed attention.
    cudnn.check_compute_capability = lambda capability: True
    nodes, per_node = target.shape
    chip = GPUS[target.kind]
    figures = {"memory": int(chip.memory.value), "bandwidth": int(chip.bandwidth.value)}
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=_GPU_CONFIG.format(**chip.compiler, **figures),
        topology=f"{nodes}x1x{per_node}",
    )  # fmt: skip
    return list(topology.devices)
