"""Peaks by JAX's device_kind."""

from types import SimpleNamespace

import pytest

from jaxtrain.planning.hardware.peak import device_peak, published_peak


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
    assert device_peak(SimpleNamespace(platform="gpu", device_kind=kind)) is None


def test_config_goes_first():
    peak = device_peak(SimpleNamespace(platform="gpu", device_kind="NVIDIA H100"), 500.0)
    assert (peak.flops, peak.source) == (500e12, "log.peak_tflops")
    assert str(peak) == "500 TFLOP/s per device (log.peak_tflops)"


def test_a_cpu_has_a_peak_only_by_config():
    cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    assert device_peak(cpu) is None
    assert device_peak(cpu, 0.5).flops == 5e11
