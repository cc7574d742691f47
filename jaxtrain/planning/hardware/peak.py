"""Peak FLOP/s of a device, for MFU: from a table of chips, or measured on CPU."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from jaxtrain.planning.hardware.chips import chip_of_device

# Dense bfloat16 TFLOP/s per JAX device, by device_kind, of chips that are not in `chips.CHIPS`; the first match counts.
# NVIDIA data sheets state bfloat16 with sparsity, twice as much. Sources:
#   nvidia.com/en-us/data-center: gb300-nvl72 (per rack / 72), hgx (B300: per board / 8), h200, h100, l40s, l4, a10; the
#   H100 architecture white paper (PCIe 756).
#   cloud.google.com/tpu/docs: v2, v3, on which JAX shows half a chip as a device.
_TABLE = (
    (r"gb300", 2500.0),
    (r"b300", 2250.0),
    (r"h200 nvl|h100 nvl", 835.5),
    (r"h100 pcie", 756.0),
    (r"gh200", 989.4),
    (r"l40s", 362.0),
    (r"\bl4\b", 121.0),
    (r"\ba10\b", 125.0),
    (r"tpu v3$", 123.0 / 2),
    (r"tpu v2$", 45.0 / 2),
)


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device and the source of the number."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.4g} TFLOP/s per device ({self.source})"


def published_peak(device_kind: str) -> Peak | None:
    """Published dense bfloat16 peak of a chip by JAX's `device_kind`; None if unknown."""
    chip = chip_of_device(device_kind)
    others = (tflops * 1e12 for pattern, tflops in _TABLE if re.search(pattern, device_kind.lower()))
    flops = chip.flops("bf16") if chip else next(others, None)
    return None if flops is None else Peak(flops, f"{device_kind}, dense bfloat16")


def device_peak(device: Any, local_devices: int, dtype: Any, tflops: float | None = None) -> Peak | None:
    """Peak of a device; None, and so no MFU, if it is unknown.

    Args:
        device: a jax.Device.
        local_devices: number of devices of this host; simulated CPU devices share its measured rate.
        dtype: compute dtype, for the measurement on CPU.
        tflops: the config's figure (`log.peak_tflops`), which takes precedence.
    """
    if tflops is not None:
        return Peak(tflops * 1e12, "log.peak_tflops")
    if device.platform == "cpu":
        return Peak(measure_cpu(dtype, device) / local_devices, "measured matmul of this host / its devices")
    return published_peak(device.device_kind)


def measure_cpu(dtype: Any, device: Any = None, seconds: float = 0.4) -> float:
    """Measures the best FLOP/s of square matmuls of `dtype` on this host's CPU.

    One device runs on all cores. Each of three sizes is repeated for a third of the time, so that the best run is one
    that no other process disturbed; a slow dtype (bfloat16 without hardware support) stops at a smaller size.
    """
    import jax
    import jax.numpy as jnp

    device = device or jax.local_devices(backend="cpu")[0]
    multiply = jax.jit(lambda a, b: a @ b)
    best, start = 0.0, time.perf_counter()
    for size in (256, 512, 1024):
        a = jax.device_put(jnp.ones((size, size), dtype), device)
        multiply(a, a).block_until_ready()
        size_start = run_start = time.perf_counter()
        while not best or (run_start - size_start < seconds / 3 and run_start - start < seconds):
            multiply(a, a).block_until_ready()
            now = time.perf_counter()
            best, run_start = max(best, 2 * size**3 / (now - run_start)), now
    return best
