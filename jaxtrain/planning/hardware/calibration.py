"""Calibration: the share of a chip's figures that programs achieve, the only constants neither counted nor published.

Each is a share of the figure in `jaxtrain.planning.hardware.chips`, with where it comes from, or that it is an
estimate. No JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.planning.hardware.chips import Chip


@dataclass(frozen=True)
class Calibration:
    """Shares of a chip's figures.

    Args:
        matmul: of the peak, by large matrix multiplications.
        attention: of the peak, by fused attention kernels, what they compute again included.
        memory: of the memory's bandwidth.
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


# Matmuls are fitted to one run, the only one known here that XLA compiled: Llama 2 7B on 8 H100, about 11.4k tokens/s a
# GPU (JAX-Toolbox, remat minimal_flash). With 0.74, an estimate of large matmuls alone, it was predicted at 12.9k.
# Attention is below what FlashAttention-3 (arXiv 2407.08608) plots for cuDNN's forward pass on H100 (4096 tokens,
# head_dim 128, no mask: 609 TFLOP/s, 0.62 of the peak), since causal masks and backward passes run slower. The rest are
# estimates of what NCCL and elementwise kernels reach. benchmarks/plan_accuracy.py has runs not fitted; these
# were in view when it was settled which one to fit to.
_HOPPER = Calibration(matmul=0.62, attention=0.50, memory=0.88, inside=0.80, outside=0.90, host=0.78, launch=2e-6)
# Estimates: an older chip comes closer to its peak. No run was in view; six of MosaicML's and torchtitan's test them.
_AMPERE = Calibration(matmul=0.85, attention=0.58, memory=0.88, inside=0.78, outside=0.90, host=0.78, launch=2e-6)
# Nothing is known: Hopper's shares, less for attention.
_BLACKWELL = Calibration(matmul=0.62, attention=0.45, memory=0.88, inside=0.80, outside=0.90, host=0.78, launch=2e-6)
# Matmuls and attention were chosen with two of MaxText's published runs in view, Llama 2 70B on v5p and Llama 3.1 8B on
# v6e, so that agreement with these proves little; its runs on v5e were not. Bandwidths are estimates.
_TPU = Calibration(matmul=0.85, attention=0.45, memory=0.85, inside=0.90, outside=0.80, host=0.80, launch=0.0)
_V6E = Calibration(matmul=0.72, attention=0.35, memory=0.85, inside=0.90, outside=0.80, host=0.80, launch=0.0)
# A CPU's rates are measured on the spot, achieved and not peak.
MEASURED = Calibration(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)

OF: dict[str, Calibration] = {
    "a100": _AMPERE, "h100": _HOPPER, "h200": _HOPPER, "b200": _BLACKWELL, "gb200": _BLACKWELL,
    "v4": _TPU, "v5e": _TPU, "v5p": _TPU, "v6e": _V6E, "tpu7x": _V6E,
}  # fmt: skip


@dataclass(frozen=True)
class Achieved:
    """The rates that programs achieve on a chip: `jaxtrain.planning.cost.roofline.Rates`."""

    chip: Chip
    shares: Calibration

    def compute(self, kind: str, dtype: str) -> float:
        """FLOP/s of a `matmul` or of `attention`."""
        return self.chip.flops(dtype) * (self.shares.attention if kind == "attention" else self.shares.matmul)

    @property
    def memory(self) -> float:
        """Bytes/s."""
        return float(self.chip.bandwidth) * self.shares.memory

    @property
    def launch(self) -> float:
        """Seconds between operations."""
        return self.shares.launch


def of_kind(kind: str) -> Calibration:
    """Returns the shares of a target's kind; `MEASURED` for one that is not in the table."""
    return OF.get(kind, MEASURED)
