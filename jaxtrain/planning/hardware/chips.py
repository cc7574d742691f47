"""Chips: FLOP/s, memory and networks, each figure with its source.

An unpublished figure is marked as an assumption. `jaxtrain.planning.hardware.calibration` has the fractions of these
figures that programs reach. FLOP/s are dense; NVIDIA states most figures with sparsity, twice as much. All figures are
per JAX device: a TPU v7 chip is two devices, any other chip is one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.errors import join_words

GIB = 2**30


@dataclass(frozen=True)
class Figure:
    """A number and its source; `assumed` if it is not published."""

    value: float
    source: str
    assumed: bool = False

    def __float__(self) -> float:
        return float(self.value)

    def per_device(self, devices: int) -> Figure:
        """Share of one of the devices of a chip."""
        return self if devices == 1 else Figure(self.value / devices, f"{self.source}, / {devices}", self.assumed)


PLANES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))  # slices of two dims


@dataclass(frozen=True)
class Torus:
    """Torus of chips, each linked to its neighbours in every dim.

    Args:
        dims: number of dims.
        link: bytes/s of one link, one way.
        latency: seconds of a hop.
        ring_multiple: a dim is a ring if its size is a multiple of this; else it is a line.
        largest: chips of the largest slice.
        ring_source: source of `ring_multiple`.
    """

    dims: int
    link: Figure
    latency: Figure
    ring_multiple: int
    largest: int
    ring_source: str
    name: str = "ICI"

    def is_ring(self, size: int) -> bool:
        """Returns whether the last chip of a dim of this size is linked to the first."""
        return size % self.ring_multiple == 0

    def is_slice(self, shape: Sequence[int]) -> bool:
        """Returns whether slices of this shape exist. Source: Cloud TPU's tables of topologies."""
        if self.dims == 3:  # full cubes, or a part of one
            return all(size % 4 == 0 for size in shape) or all(size in (1, 2, 4) for size in shape)
        return tuple(sorted(shape)) in PLANES

    @property
    def slice_shapes(self) -> str:
        """Describes the shapes that `is_slice` accepts."""
        return "sizes of 1, 2 or 4, or multiples of 4" if self.dims == 3 else join_words(f"{a}x{b}" for a, b in PLANES)


@dataclass(frozen=True)
class Switch:
    """Switched network of the GPUs of one NVLink domain.

    Args:
        size: most GPUs of a domain.
        bandwidth: bytes/s of a GPU, one way.
        latency: seconds of a step of a ring.
        start: seconds before a collective moves data.
        spans_hosts: a domain is a rack of hosts; else it is one host.
    """

    size: int
    bandwidth: Figure
    latency: Figure
    start: Figure
    spans_hosts: bool = False
    name: str = "NVLink"

    def domain_size(self, per_host: int) -> int:
        """GPUs of a domain, given those of a host."""
        return self.size if self.spans_hosts else per_host


@dataclass(frozen=True)
class SharedMemory:
    """Network of simulated devices: the memory of their host.

    Args:
        copy: bytes/s of a device in a collective that copies, counted as twice its full tensor.
        reduce: the same for a collective that adds.
        barrier: seconds for each member of a group to meet the others; a permute waits for all devices.
        devices: number of devices of the mesh.
    """

    copy: Figure
    reduce: Figure
    barrier: Figure
    devices: int
    name: str = "host"


@dataclass(frozen=True)
class Link:
    """Link from a device out of its node or slice, or to its host: bytes/s one way, and seconds of a step."""

    name: str
    bandwidth: Figure
    latency: Figure


@dataclass(frozen=True)
class Chip:
    """Figures of one JAX device.

    Args:
        device_kind: pattern that matches JAX's `device_kind` in lower case.
        peak: FLOP/s by dtype: `bf16`, `fp16`, `fp8`, `fp32`, `tf32`, `int8`.
        memory: bytes.
        usable: bytes that a program may allocate.
        bandwidth: bytes/s of the memory.
        inside: network of a node or slice; None if unknown.
        outside: network between nodes or slices.
        host: link to the memory of its host.
        devices: JAX devices per chip.
        compiler: other fields of XLA's GpuTargetConfig, for GPUs.
    """

    device_kind: str
    peak: Mapping[str, Figure]
    memory: Figure
    usable: Figure
    bandwidth: Figure
    inside: Torus | Switch | SharedMemory | None = None
    outside: Link | None = None
    host: Link | None = None
    devices: int = 1
    compiler: Mapping[str, Any] = field(default_factory=dict)

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of matrix multiplications of an HLO element type such as `bf16`, `f32` or `f8e4m3fn`.

        A dtype that the chip does not support runs as the next wider one; others run as float32.
        """
        names = {"bf16": ("bf16",), "f16": ("fp16",), "tf32": ("tf32", "fp32")}.get(dtype, ("fp32",))
        if dtype.startswith("f8"):
            names = ("fp8",)
        elif dtype in ("s8", "u8", "s4", "u4", "pred"):
            names = ("int8",)
        return float(next(self.peak[name] for name in (*names, "bf16") if name in self.peak))


_A100 = "NVIDIA A100 Tensor Core GPU datasheet (SXM 80 GB)"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture white paper (SXM5)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (SXM)"
_B200 = "NVIDIA Blackwell datasheet, HGX B200 / 8, without sparsity"
_GB200 = "NVIDIA GB200 NVL72 datasheet / 72, without sparsity"
_COPY_LATENCY = Figure(10e-6, "start of a copy", assumed=True)
_SPEC = "device properties in XLA's target_config/specs"
_NCCL = "NCCL src/graph/tuning.cc, ring, protocol LL"
_CLOUD = "Cloud TPU documentation"
_LIBTPU = "memory that libtpu's compiler reports as available"
_BOOK = "How to Scale Your Model (jax-ml scaling book)"


def _peaks(source: str, **tera: float) -> dict[str, Figure]:
    return {name: Figure(value * 1e12, source) for name, value in tera.items()}


def _disputed_peaks(**tera: float) -> dict[str, Figure]:
    """TFLOP/s for which publications differ; the lowest."""
    source = "the lowest of differing publications on Blackwell"
    return {name: Figure(value * 1e12, source, assumed=True) for name, value in tera.items()}


def _pcie(bandwidth: float, source: str, *, assumed: bool = False) -> Link:
    """PCIe link to a device's host, bytes/s one way."""
    return Link("PCIe", Figure(bandwidth, source, assumed), _COPY_LATENCY)


def _gpu(
    device_kind: str, peak: dict[str, Figure], spec: str, memory: int, bandwidth: float, nvlink: Figure,
    network: Figure, host: Link, node: int = 8, **compiler: Any,
) -> Chip:  # fmt: skip
    """GPU; `nvlink` and `network` in bytes/s of a GPU, one way."""
    return Chip(
        device_kind, peak, Figure(memory, f"{_SPEC}/{spec}"),
        Figure(0.93 * memory, "all but 7% for CUDA, cuDNN, NCCL and fragmentation", assumed=True),
        Figure(bandwidth, f"{_SPEC}/{spec}"),
        Switch(node, nvlink, Figure(0.6e-6, f"{_NCCL}, NVLink"), Figure(6.6e-6, f"{_NCCL}, base"), node > 8),
        Link("InfiniBand", network, Figure(2.7e-6, f"{_NCCL}, network")),
        host,
        compiler=_HOPPER | compiler,
    )  # fmt: skip


_HOPPER = {
    "shared_memory_per_core": 233472, "shared_memory_per_block_optin": 232448, "core_count": 132, "fpus_per_core": 128,
    "l2_cache_size": 52428800, "clock_rate_ghz": 1.98, "major": 9, "minor": 0,
}  # fmt: skip
_HOPPER_PEAK = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp8": 1978.9, "int8": 1978.9}

GPUS: dict[str, Chip] = {
    "a100": _gpu(
        r"\ba[18]00\b", _peaks(_A100, bf16=312, fp16=312, tf32=156, fp32=19.5, int8=624),
        "a100_sxm_80", 85100068864, 2.03904e12,
        Figure(300e9, f"{_A100}: NVLink 600 GB/s both ways"),
        Figure(25e9, "NVIDIA DGX A100 datasheet: 8 x 200 Gb/s InfiniBand for 8 GPUs"),
        host=_pcie(32e9, f"{_A100}: PCIe Gen4, 64 GB/s both ways"),
        name="NVIDIA A100-SXM4-80GB", shared_memory_per_core=167936, shared_memory_per_block_optin=166912,
        core_count=108, fpus_per_core=64, l2_cache_size=41943040, clock_rate_ghz=1.41, major=8,
    ),
    "h100": _gpu(
        r"\bh[18]00\b(?! pcie| nvl)", _peaks(_H100, **_HOPPER_PEAK), "h100_sxm", 84942979072, 3.35232e12,
        Figure(450e9, f"{_H100}: NVLink 900 GB/s both ways"),
        Figure(50e9, "NVIDIA DGX H100 datasheet: 8 x 400 Gb/s InfiniBand for 8 GPUs"),
        host=_pcie(64e9, f"{_H100}: PCIe Gen5, 128 GB/s both ways"),
        name="NVIDIA H100 80GB HBM3",
    ),
    "h200": _gpu(
        r"\bh200\b(?! nvl)", _peaks(_H200, **_HOPPER_PEAK), "h200", 151397597184, 4.8e12,
        Figure(450e9, f"{_H200}: NVLink 900 GB/s both ways"),
        Figure(50e9, "NVIDIA DGX H200 datasheet: 8 x 400 Gb/s InfiniBand for 8 GPUs"),
        host=_pcie(64e9, f"{_H200}: PCIe Gen5, 128 GB/s both ways"),
        name="NVIDIA H200",
    ),
    "b200": _gpu(
        r"(?<!g)b200\b", _peaks(_B200, bf16=2250, fp16=2250, fp8=4500, int8=4500) | _disputed_peaks(tf32=1100, fp32=75),
        "b200", 191514411008, 7.67232e12,
        Figure(900e9, f"{_B200}: NVLink 1.8 TB/s both ways"),
        Figure(50e9, "NVIDIA DGX B200 datasheet: 8 x 400 Gb/s InfiniBand for 8 GPUs"),
        host=_pcie(64e9, "PCIe Gen5 x16, 128 GB/s both ways", assumed=True),
        name="NVIDIA B200", core_count=148, l2_cache_size=132644864, clock_rate_ghz=1.965, major=10,
    ),
    "gb200": _gpu(
        r"\bgb200\b", _peaks(_GB200, bf16=2500, fp16=2500, fp8=5000, int8=5000) | _disputed_peaks(tf32=1250, fp32=80),
        "gb200", 197897748480, 7.928064e12,
        Figure(900e9, f"{_GB200}: NVLink 1.8 TB/s both ways"),
        Figure(50e9, "NVIDIA DGX GB200 datasheet: 72 x 400 Gb/s InfiniBand for 72 GPUs"),
        host=Link(
            "NVLink-C2C", Figure(225e9, f"{_GB200}: 900 GB/s both ways for a Grace and its two GPUs", True),
            _COPY_LATENCY,
        ),
        node=72, name="NVIDIA GB200", core_count=152, l2_cache_size=135528448, clock_rate_ghz=2.062, major=10,
    ),
}  # fmt: skip

_CUBES = f"{_CLOUD}: slices of full 4x4x4 cubes are tori, smaller ones are meshes"
_PODS = f"{_BOOK}: only a dim of 16, that of the full pod, is a ring"
_FLOAT32 = "bf16 / 6: JAX multiplies float32 at the highest precision in six bf16 passes"


def _tpu(
    version: str, device_kind: str, *, network: Torus, dcn: Figure, host: Link, memory: float, usable: float,
    bandwidth: float, devices: int = 1, **tera: float,
) -> Chip:  # fmt: skip
    """TPU. Arguments are figures of a chip, `usable` of a device: memory in GiB, TFLOP/s, GB/s."""
    source = f"{_CLOUD}, TPU {version}"
    peak = _peaks(source, **tera) | {"fp32": Figure(tera["bf16"] * 1e12 / 6, _FLOAT32)}
    return Chip(
        device_kind, {name: figure.per_device(devices) for name, figure in peak.items()},
        Figure(memory * GIB / devices, source), Figure(usable * GIB, _LIBTPU),
        Figure(bandwidth * 1e9 / devices, source), network,
        Link("DCN", dcn.per_device(devices), Figure(10e-6, "half a round trip", assumed=True)), host, devices,
    )  # fmt: skip


def _torus(dims: int, link: float, source: str, largest: int) -> Torus:
    ring_multiple, ring_source = (4, _CUBES) if dims == 3 else (16, _PODS)
    latency = Figure(1e-6, f"{_BOOK}: about 1 us a hop")
    return Torus(dims, Figure(link, source), latency, ring_multiple, largest, ring_source)


TPUS: dict[str, Chip] = {
    "v4": _tpu(
        "v4", r"tpu v4$", bf16=275, int8=275, memory=32, usable=30.75, bandwidth=1200,
        network=_torus(3, 50e9, "TPU v4 (arXiv 2304.01433): six ICI links of 50 GB/s", 4096),
        dcn=Figure(6.25e9, "200 Gb/s of a host with 4 chips", assumed=True),
        host=_pcie(16e9, f"{_BOOK}: 16 GB/s each way"),
    ),
    "v5e": _tpu(
        "v5e", r"tpu v5 lite|tpu v5e", bf16=197, int8=393, memory=16, usable=15.75, bandwidth=819,
        network=_torus(2, 50e9, f"{_CLOUD}, TPU v5e: 400 GB/s both ways over 4 ports", 256),
        dcn=Figure(3.125e9, f"{_CLOUD}, TPU v5e: 6.4 Tb/s of a pod of 256"),
        host=_pcie(15e9, f"{_BOOK}: typically 15 GB/s of a chip"),
    ),
    "v5p": _tpu(
        "v5p", r"tpu v5p?$", bf16=459, fp8=459, memory=95, usable=95.74, bandwidth=2765,
        network=_torus(3, 100e9, f"{_CLOUD}, TPU v5p: 1200 GB/s both ways over 6 links", 6144),
        dcn=Figure(6.25e9, f"{_CLOUD}, TPU v5p: 50 Gb/s"),
        host=_pcie(15e9, f"{_BOOK}: typically 15 GB/s of a chip"),
    ),
    "v6e": _tpu(
        "v6e", r"tpu v6 lite|tpu v6e", bf16=918, fp8=918, int8=1836, memory=32, usable=31.25, bandwidth=1638,
        network=_torus(2, 100e9, f"{_CLOUD}, TPU v6e: 800 GB/s both ways over 4 ports", 256),
        dcn=Figure(12.5e9, f"{_CLOUD}, TPU v6e: 100 Gb/s"),
        host=_pcie(32e9, f"{_BOOK}: 32 GB/s"),
    ),
    "tpu7x": _tpu(
        "TPU7x", r"tpu ?v?7x?", bf16=2307, fp8=4614, memory=192, usable=94.75, bandwidth=7380,
        network=_torus(3, 100e9, f"{_CLOUD}, TPU7x: 1200 GB/s both ways over 6 links", 9216),
        dcn=Figure(12.5e9, f"{_CLOUD}, TPU7x: 100 Gb/s"), devices=2,
        host=_pcie(16e9, "half of a TPU v6e chip's 32 GB/s", assumed=True),
    ),
}  # fmt: skip

CHIPS: dict[str, Chip] = GPUS | TPUS


def chip_kind(chip: Chip | None) -> str:
    """Key of a chip in CHIPS; empty for None and for unknown chips."""
    return next((kind for kind, other in CHIPS.items() if other is chip), "")


def chip_of_device(device_kind: str) -> Chip | None:
    """Chip that JAX calls `device_kind`; None if it is not in the table."""
    return next((chip for chip in CHIPS.values() if re.search(chip.device_kind, device_kind.lower())), None)
