"""Devices to compile for on a machine that has none of them. No JAX at import: some of it is set before JAX starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from jaxtrain.core import xla_options
from jaxtrain.errors import UserError, did_you_mean, join_words
from jaxtrain.planning.hardware.chips import CHIPS, GPUS, TPUS, Chip, Switch, Torus

# A GPU in XLA's GpuTargetConfig text form, with NVIDIA's public device properties.
_GPU = """gpu_device_info {{
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
SIMULATED = ("simulate", "cpu")  # two names of the same
SHAPES = "h100:NODESxGPUS, v5p:4x4x4, simulate:8 or local"
TOOLKIT = Path(__file__).parent / "toolkit"  # stands in for CUDA's: nothing that is compiled for a target is run


@dataclass(frozen=True)
class Target:
    """Devices, there or not.

    Args:
        kind: a key of `chips.CHIPS`, `simulate` or `cpu` (CPU devices of this machine), or `local` (what JAX finds).
        shape: (nodes, GPUs per node), the torus of a slice, (devices,), or () of `local`.
        slices: TPU slices, which the data center's network joins.
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
        """Chip of the target; None for a CPU, and for `local`, which JAX has to look for."""
        return CHIPS.get(self.kind)

    @property
    def devices(self) -> int | None:
        """JAX devices; None of `local`."""
        if self.platform == "local":
            return None
        return prod(self.shape) * self.slices * (self.chip.devices if self.chip else 1)

    def __str__(self) -> str:
        shape = ":" + "x".join(map(str, self.shape)) if self.shape else ""
        return f"{self.kind}{shape}" + (f"*{self.slices}" if self.slices > 1 else "")


def parse(text: str, slices: int | None = None) -> Target:
    """`h100:64x8` (64 nodes of 8), `h100:8` (one node), `v5p:8x8x8`, `v5p:4x4x4*2` (2 slices), `simulate:8`, `local`.

    Args:
        slices: of TPUs, as an alternative to `*2`.

    Raises:
        UserError: an unknown kind, or a shape that it does not come in.
    """
    kind, _, rest = text.strip().lower().partition(":")
    shape, star, count = rest.partition("*")
    kinds = (*CHIPS, *SIMULATED, "local")
    if kind not in kinds:
        raise UserError(
            f"target {text}: no such device{did_you_mean(kind, kinds)}; known are {join_words(kinds, 'and')}"
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape or "1") or (star and not re.fullmatch(r"[1-9]\d*", count)):
        raise UserError(f"target {text}: expected a shape such as {SHAPES}")
    if slices is not None and slices < 1:
        raise UserError(f"target {text}: {slices} slices; expected 1 or more")
    if star and slices not in (None, int(count)):
        raise UserError(f"target {text}: has {count} slices, and --slices says {slices}; expected one of both")
    several = int(count) if star else slices or 1
    if several > 1 and kind not in TPUS:
        raise UserError(f"target {text}: slices are of TPUs; expected such as h100:NODESxGPUS, or v5p:4x4x4*{several}")
    return Target(kind, _sizes(text, kind, shape), several)


def _sizes(text: str, kind: str, shape: str) -> tuple[int, ...]:
    """The shape of a target, checked against what its kind comes in."""
    if kind == "local":
        if shape:
            raise UserError(f"target {text}: local is what JAX finds and has no shape")
        return ()
    sizes = tuple(int(size) for size in (shape or "1").split("x"))
    if kind in GPUS and len(sizes) == 1:
        sizes = (1, *sizes)
    network = CHIPS[kind].inside if kind in CHIPS else None
    dims = network.dims if isinstance(network, Torus) else 2 if kind in GPUS else 1
    if len(sizes) != dims:
        raise UserError(f"target {text}: {kind} has {dims} sizes, not {len(sizes)}; expected such as {_example(kind)}")
    if isinstance(network, Torus) and prod(sizes) > network.largest:
        raise UserError(f"target {text}: {prod(sizes)} chips, and the largest slice of {kind} has {network.largest}")
    if isinstance(network, Torus) and not network.has(sizes):
        raise UserError(f"target {text}: no slice of {kind} has this shape; expected {network.shapes}")
    if isinstance(network, Switch) and sizes[1] > network.size:
        fits = f"{kind}:{-(-prod(sizes) // network.size)}x{network.size}"
        raise UserError(f"target {text}: a node of {kind} has at most {network.size} GPUs; expected such as {fits}")
    return sizes


def _example(kind: str) -> str:
    return "v6e:4x4" if kind in ("v5e", "v6e") else SHAPES


def environment(target: Target) -> dict[str, str]:
    """Variables that must be set before JAX starts in the process that compiles for a target."""
    if target.platform == "local":
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # leave the memory of a GPU to what runs on it
    out = {"JAX_PLATFORMS": "cpu"}  # never take, or wait for, the devices of this machine
    if target.platform == "cuda":
        out["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of the CUDA libraries that only running needs
        out["CUDA_ROOT"] = str(TOOLKIT)
    elif target.platform == "tpu":
        # No look for a TPU host around it; and several processes may compile at the same time.
        out |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    else:
        out["JAX_NUM_CPU_DEVICES"] = str(target.shape[0])
    return out


def missing(target: Target, attention: str = "auto") -> str | None:
    """Names what to install before compiling for a target, in one line; None if nothing is missing.

    A GPU's attention is cuDNN's, which compiles against the library, unless the kernel named is another.
    """
    cudnn = ["nvidia-cudnn-cu13"] if attention in ("auto", "cudnn") else []
    extra, needs = {
        "cuda": ("plan-gpu", ["jax-cuda13-plugin", *cudnn]),
        "tpu": ("plan-tpu", ["libtpu"]),
    }.get(target.platform, ("", []))
    absent = [package for package in needs if not _installed(package)]
    if absent:
        return f"target {target}: compiling for it needs {join_words(absent, 'and')}; pip install 'jaxtrain[{extra}]'"
    if target.platform == "tpu" and (other := _other_libtpu()):
        return f"target {target}: {other}; pip install 'jaxtrain[{extra}]'"
    return None


def _other_libtpu() -> str | None:
    """Returns the problem of the installed libtpu: JAX cannot read all programs that a newer one compiles."""
    wanted = [re.match(r"libtpu==([\d.]+)\.\*", line) for line in metadata.requires("jax") or ()]
    found = metadata.version("libtpu")
    for match in filter(None, wanted):
        if not f"{found}.".startswith(f"{match[1]}."):
            return f"libtpu {found} is not the one of jax {metadata.version('jax')}, {match[1]}"
    return None


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def devices(kind: str, *shape: int, attention: str = "auto") -> list[Any]:
    """Devices to compile for, absent ones too: `devices("h100", nodes, per_node)`, `devices("v5p:4x4x4*2")`.

    `attention` is the kernel that the program will use. The process must have been started with `environment(target)`.

    Raises:
        UserError: an unknown target, or a package is not installed.
    """
    target = parse(f"{kind}:{'x'.join(map(str, shape))}" if shape else kind)
    if problem := missing(target, attention):
        raise UserError(problem)
    xla_options.prepare()
    import jax

    if target.platform == "local":
        return list(jax.devices())
    if target.platform == "cpu":
        return list(jax.devices("cpu")[: target.shape[0]])
    return _tpus(target) if target.platform == "tpu" else _gpus(target)


def _tpus(target: Target) -> list[Any]:
    """One device for each chip (two on TPU v7); v4 too, whose two cores JAX joins on real chips (`megacore`)."""
    from jax.experimental import topologies

    name = f"{target.kind}:{'x'.join(map(str, target.shape))}"
    options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
    if target.kind == "v4":
        options["chip_config_name"] = "megacore"
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


def _gpus(target: Target) -> list[Any]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental import topologies

    # JAX asks the GPU of this machine, not the one compiled for, whether it can do packed attention.
    cudnn.check_compute_capability = lambda capability: True
    nodes, per_node = target.shape
    chip = GPUS[target.kind]
    numbers = {"memory": int(chip.memory.value), "bandwidth": int(chip.bandwidth.value)}
    made = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=_GPU.format(**chip.compiler, **numbers),
        topology=f"{nodes}x1x{per_node}",
    )  # fmt: skip
    return list(made.devices)


def capacity(kind: str) -> int:
    """Bytes of memory that a device has."""
    return int(CHIPS[kind].memory.value)
