"""Calibration: the fraction of a chip's published figures that programs reach.

These are the only constants of a plan that are neither counted nor published. Each is a fraction of a figure in
`jaxtrain.planning.hardware.chips`; a comment names the run it was fitted to, or says that it is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtrain.planning.hardware.chips import Chip


@dataclass(frozen=True)
class Calibration:
    """Fractions of a chip's figures that programs reach.

    Args:
        matmul: of the peak, in large matrix multiplications.
        attention: of the peak, in fused attention kernels, with the FLOPs that they recompute.
        memory: of the memory bandwidth.
        inside: of the bandwidth of NVLink or ICI.
        outside: of the bandwidth between nodes or slices.
        host: of the bandwidth between a device and its host.
        launch: seconds between one operation and the next.
    """

    matmul: float
    attention: float
    memory: float
    inside: float
    outside: float
    host: float
    launch: float


# `matmul` is fitted to one published run of an XLA program: Llama 2 7B on 8 H100, about 11.4k tokens/s per GPU
# (JAX-Toolbox, remat minimal_flash). With 0.74, an estimate for large matmuls alone, the prediction was 12.9k.
# `attention` is below what FlashAttention-3 (arXiv 2407.08608) plots for cuDNN's forward pass on H100 (4096 tokens,
# head_dim 128, no mask: 609 TFLOP/s, 0.62 of the peak), since causal masks and backward passes are slower. The others
# are estimates for NCCL and elementwise kernels. benchmarks/plan_accuracy.py compares with runs that were not fitted;
# they were known when the one to fit was chosen.
_HOPPER = Calibration(matmul=0.62, attention=0.50, memory=0.88, inside=0.80, outside=0.90, host=0.78, launch=2e-6)
# Estimates: an older chip comes closer to its peak. No run was known; six runs of MosaicML and torchtitan test them.
_AMPERE = Calibration(matmul=0.85, attention=0.58, memory=0.88, inside=0.78, outside=0.90, host=0.78, launch=2e-6)
# No data: Hopper's values, less for attention.
_BLACKWELL = Calibration(matmul=0.62, attention=0.45, memory=0.88, inside=0.80, outside=0.90, host=0.78, launch=2e-6)
# `matmul` and `attention` were chosen with two published MaxText runs known (Llama 2 70B on v5p, Llama 3.1 8B on v6e),
# so agreement with these proves little; its runs on v5e were not known. Bandwidths are estimates.
_TPU = Calibration(matmul=0.85, attention=0.45, memory=0.85, inside=0.90, outside=0.80, host=0.80, launch=0.0)
_V6E = Calibration(matmul=0.72, attention=0.35, memory=0.85, inside=0.90, outside=0.80, host=0.80, launch=0.0)
# Rates of a CPU are measured, so they are already those that programs reach.
MEASURED = Calibration(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)

CALIBRATIONS: dict[str, Calibration] = {
    "a100": _AMPERE, "h100": _HOPPER, "h200": _HOPPER, "b200": _BLACKWELL, "gb200": _BLACKWELL,
    "v4": _TPU, "v5e": _TPU, "v5p": _TPU, "v6e": _V6E, "tpu7x": _V6E,
}  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Rates that programs reach on a chip.

    Args:
        compute: (`matmul` or `attention`, HLO element type) -> FLOP/s.
        memory: bytes/s.
        launch: seconds between one operation and the next.
    """

    compute: Callable[[str, str], float]
    memory: float
    launch: float = 0.0


def achieved_rates(chip: Chip, calibration: Calibration) -> Rates:
    """Rates of a chip, reduced to the fractions that programs reach."""

    def compute(kind: str, dtype: str) -> float:
        return chip.flops(dtype) * (calibration.attention if kind == "attention" else calibration.matmul)

    return Rates(compute, float(chip.bandwidth) * calibration.memory, calibration.launch)


def calibration_of(kind: str) -> Calibration:
    """Calibration of a target's kind; `MEASURED` for one that is not in the table."""
    return CALIBRATIONS.get(kind, MEASURED)
