"""Devices to compile for on a machine that has none of them. No JAX at import: some of it is set before JAX starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxtrain.config.errors import UserError, did_you_mean, join

# Properties of a GPU in XLA's GpuTargetConfig text form. The numbers are NVIDIA's public device properties.
_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""
GPUS = {
    "h100": {"bandwidth": 3352320000000, "memory": 84978434048, "name": "NVIDIA H100 80GB HBM3"},
    "h200": {"bandwidth": 4800000000000, "memory": 150121545728, "name": "NVIDIA H200"},
}
TPUS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}  # dims of the torus
SHAPES = "h100:NODESxGPUS, v5p:4x4x4 or cpu:8"
TOOLKIT = Path(__file__).parent / "toolkit"  # stands in for CUDA's: nothing that is compiled for a target is run


@dataclass(frozen=True)
class Target:
    """`kind` is a key of GPUS or TPUS, or `cpu`; `shape` is (nodes, GPUs per node), the torus, or (devices,)."""

    kind: str
    shape: tuple[int, ...]

    @property
    def platform(self) -> str:
        """`cuda`, `tpu` or `cpu`."""
        return "cuda" if self.kind in GPUS else "tpu" if self.kind in TPUS else "cpu"

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"


def parse(text: str) -> Target:
    """`h100:64x8` (64 nodes of 8), `h100:8` (one node), `v5p:8x8x8`, `cpu:8` (simulated).

    Raises:
        UserError: an unknown kind, or a shape that it does not come in.
    """
    kind, _, shape = text.lower().partition(":")
    kinds = (*GPUS, *TPUS, "cpu")
    if kind not in kinds:
        raise UserError(f"target {text}: no such device{did_you_mean(kind, kinds)}; known are {join(kinds, 'and')}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape or "1"):
        raise UserError(f"target {text}: expected a shape such as {SHAPES}")
    sizes = tuple(int(size) for size in (shape or "1").split("x"))
    if kind in GPUS and len(sizes) == 1:
        sizes = (1, *sizes)
    dims = TPUS.get(kind, 2 if kind in GPUS else 1)
    if len(sizes) != dims:
        raise UserError(f"target {text}: {kind} has {dims} sizes, not {len(sizes)}; expected such as {SHAPES}")
    return Target(kind, sizes)


def environment(target: Target) -> dict[str, str]:
    """Variables that must be set before JAX starts in the process that compiles for a target."""
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
    """What to install before compiling for a target, in one line; None where all is there.

    A GPU's attention is cuDNN's, which compiles against the library, unless the kernel named is another.
    """
    cudnn = {"nvidia.cudnn": "nvidia-cudnn-cu13"} if attention in ("auto", "cudnn") else {}
    extra, needs = {
        "cuda": ("plan-gpu", {"jax_plugins.xla_cuda13": "jax-cuda13-plugin"} | cudnn),
        "tpu": ("plan-tpu", {"libtpu": "libtpu"}),
        "cpu": ("", {}),
    }[target.platform]
    absent = [package for module, package in needs.items() if not _installed(module)]
    if absent:
        return f"target {target}: compiling for it needs {join(absent, 'and')}; pip install 'jaxtrain[{extra}]'"
    if target.platform == "tpu" and (other := _other_libtpu()):
        return f"target {target}: {other}; pip install 'jaxtrain[{extra}]'"
    return None


def _other_libtpu() -> str | None:
    """What is wrong with the installed libtpu: JAX cannot read all programs that a newer one compiles."""
    wanted = [re.match(r"libtpu==([\d.]+)\.\*", line) for line in metadata.requires("jax") or ()]
    found = metadata.version("libtpu")
    for match in filter(None, wanted):
        if not f"{found}.".startswith(f"{match[1]}."):
            return f"libtpu {found} is not the one of jax {metadata.version('jax')}, {match[1]}"
    return None


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def devices(kind: str, *shape: int, attention: str = "auto") -> list[Any]:
    """Absent devices to compile for: `devices("h100", nodes, per_node)`, `devices("v5p", 4, 4, 4)`.

    `attention` is the kernel that the program will use. The process must have been started with `environment(target)`.

    Raises:
        UserError: an unknown target, or a package is not installed.
    """
    target = parse(f"{kind}:{'x'.join(map(str, shape))}" if shape else kind)
    if problem := missing(target, attention):
        raise UserError(problem)
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        return list(jax.devices("cpu")[: target.shape[0]])
    if target.platform == "tpu":
        return list(topologies.get_topology_desc(platform="tpu", topology_name=str(target)).devices)
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # JAX asks the GPU of this machine, not the one compiled for, whether it can do packed attention.
    cudnn.check_compute_capability = lambda capability: True
    nodes, per_node = target.shape
    made = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=_GPU.format(**GPUS[target.kind]),
        topology=f"{nodes}x1x{per_node}",
    )  # fmt: skip
    return list(made.devices)


def capacity(kind: str) -> int:
    """Bytes of memory that a GPU has."""
    return int(GPUS[kind]["memory"])
