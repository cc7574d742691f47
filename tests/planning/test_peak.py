"""Peaks by JAX's device_kind, and the measured one."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxtrain.planning.hardware.peak import device_peak, measure_cpu, published_peak


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("TPU v6e", 918),
        ("TPU v7x", 1153.5),
        ("TPU7x", 1153.5),
    ],
)
def test_known_chips(kind, tflops):
    assert published_peak(kind).flops == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("kind", ["cpu", "Tesla T4", "NVIDIA RTX A1000", "TPU v4 lite", "AMD Instinct MI300X"])
def test_unknown_chips_have_no_peak(kind):
    assert published_peak(kind) is None
    assert device_peak(SimpleNamespace(platform="gpu", device_kind=kind), 1, jnp.bfloat16) is None


def test_config_goes_first():
    peak = device_peak(SimpleNamespace(platform="gpu", device_kind="NVIDIA H100"), 8, jnp.bfloat16, 500.0)
    assert (peak.flops, peak.source) == (500e12, "log.peak_tflops")
    assert str(peak) == "500 TFLOP/s per device (log.peak_tflops)"


def test_cpu_is_measured_and_shared(monkeypatch):
    monkeypatch.setattr("jaxtrain.planning.hardware.peak.measure_cpu", lambda dtype, device: 80e9)
    assert device_peak(SimpleNamespace(platform="cpu", device_kind="cpu"), 8, jnp.float32).flops == 10e9


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_measuring_is_quick_and_plausible(dtype):
    began = time.perf_counter()
    flops = measure_cpu(dtype, seconds=0.1)
    assert time.perf_counter() - began < 5
    assert 1e8 < flops < 1e14
