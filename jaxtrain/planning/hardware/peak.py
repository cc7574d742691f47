"""Peak matrix-multiplication rate of a device, for MFU: from a table of known chips, or measured on CPU."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

# Dense bfloat16 TFLOP/s per JAX device, by device_kind; the first match counts.
# NVIDIA data sheets state bfloat16 with sparsity: halved here. Sources:
#   nvidia.com/en-us/data-center: dgx-gb200 and gb300-nvl72 (per rack / 72), hgx (B200, B300: per board / 8), h200,
#   h100, a100, l40s, l4, a10; the H100 architecture white paper (SXM 989.4, PCIe 756).
#   cloud.google.com/tpu/docs: v2, v3, v4, v5e, v5p, v6e, tpu7x. On v2, v3 and v7x JAX shows half a chip as a device.
_TABLE = (
    (r"gb300|gb200", 2500.0),
    (r"b300|b200", 2250.0),
    (r"h200 nvl|h100 nvl", 835.5),
    (r"h100 pcie", 756.0),
    (r"gh200|h200|h100|h800", 989.4),
    (r"\ba[18]00\b", 312.0),
    (r"l40s", 362.0),
    (r"\bl4\b", 121.0),
    (r"\ba10\b", 125.0),
    (r"tpu ?v?7x?", 2307.0 / 2),
    (r"tpu v6 lite|tpu v6e", 918.0),
    (r"tpu v5 lite|tpu v5e", 197.0),
    (r"tpu v5p?$", 459.0),
    (r"tpu v4$", 275.0),
    (r"tpu v3$", 123.0 / 2),
    (r"tpu v2$", 45.0 / 2),
)


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device and where the number comes from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.4g} TFLOP/s per device ({self.source})"


def known_peak(device_kind: str) -> Peak | None:
    """The published dense bfloat16 peak of a chip by JAX's `device_kind`, or None for an unknown one."""
    for pattern, tflops in _TABLE:
        if re.search(pattern, device_kind.lower()):
            return Peak(tflops * 1e12, f"{device_kind}, dense bfloat16")
    return None


def device_peak(device: Any, local_devices: int, dtype: Any, tflops: float | None = None) -> Peak | None:
    """Peak of a device; None, and so no MFU, where nobody knows it.

    Args:
        device: a jax.Device.
        local_devices: devices of this host; simulated CPU devices share its measured rate.
        dtype: compute dtype, for the measurement on CPU.
        tflops: the config's own figure (`log.peak_tflops`), which goes first.
    """
    if tflops is not None:
        return Peak(tflops * 1e12, "log.peak_tflops")
    if device.platform == "cpu":
        return Peak(measure_cpu(dtype, device) / local_devices, "measured matmul of this host / its devices")
    return known_peak(device.device_kind)


def measure_cpu(dtype: Any, device: Any = None, seconds: float = 0.4) -> float:
    """Best FLOP/s of square matmuls of `dtype` on this host's CPU.

    One device runs on all cores. Each of three sizes is repeated for a third of the time, so that the best falls into
    a moment in which nothing else ran; a slow dtype (bfloat16 where the CPU has none) stops at a smaller size.
    """
    import jax
    import jax.numpy as jnp

    device = device or jax.local_devices(backend="cpu")[0]
    multiply = jax.jit(lambda a, b: a @ b)
    best, start = 0.0, time.perf_counter()
    for size in (256, 512, 1024):
        a = jax.device_put(jnp.ones((size, size), dtype), device)
        multiply(a, a).block_until_ready()
        turn = began = time.perf_counter()
        while not best or (began - turn < seconds / 3 and began - start < seconds):
            multiply(a, a).block_until_ready()
            now = time.perf_counter()
            best, began = max(best, 2 * size**3 / (now - began)), now
    return best
