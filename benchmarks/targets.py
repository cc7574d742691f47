"""NVIDIA GPUs as compile targets on a machine that has none: device properties in XLA's GpuTargetConfig text form.

Needs the packages jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cudnn-cu13 of jax's own version, and
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1. The numbers are NVIDIA's public device properties.
"""

from __future__ import annotations

from typing import Any

_TEMPLATE = """gpu_device_info {{
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
TARGETS = {
    "h100": {"bandwidth": 3352320000000, "memory": 84978434048, "name": "NVIDIA H100 80GB HBM3"},
    "h200": {"bandwidth": 4800000000000, "memory": 150121545728, "name": "NVIDIA H200"},
}


def devices(target: str, nodes: int = 1, gpus: int = 1) -> list[Any]:
    """Absent GPUs to compile for: so many nodes with so many GPUs each."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental import topologies

    # JAX asks the GPU of this machine, not the one compiled for, whether it can do packed attention.
    cudnn.check_compute_capability = lambda capability: True
    config = _TEMPLATE.format(**TARGETS[target])
    made = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=f"{nodes}x1x{gpus}"
    )
    return list(made.devices)


def limit(target: str) -> dict[str, int]:
    """Bytes that the GPU has."""
    return {"limit": int(TARGETS[target]["memory"])}
