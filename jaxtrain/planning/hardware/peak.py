"""Peak FLOP/s of a device, for MFU, from a table of chips."""

from __future__ import annotations

import re
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


def device_peak(device: Any, tflops: float | None = None) -> Peak | None:
    """Peak of a device; None, and so no MFU, if it is unknown.

    A CPU has none: simulated devices share its cores, and a measured rate varies with what else runs on them.

    Args:
        device: a jax.Device.
        tflops: the config's figure (`log.peak_tflops`), which takes precedence.
    """
    return published_peak(device.device_kind) if tflops is None else Peak(tflops * 1e12, "log.peak_tflops")
