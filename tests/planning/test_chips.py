"""The table of chips: complete, sourced, and in step with the peaks that runs are measured by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jaxtrain.planning.hardware import chips
from jaxtrain.planning.hardware.chips import CHIPS, GPUS, TPUS, Figure, Switch, Torus
from jaxtrain.planning.hardware.peak import published_peak

# As JAX names them.
KINDS = {
    "a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200", "b200": "NVIDIA B200",
    "gb200": "NVIDIA GB200", "v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}  # fmt: skip


def figures(value: Any) -> Iterator[Figure]:
    if isinstance(value, Figure):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from figures(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from figures(getattr(value, field.name))


@pytest.mark.parametrize("kind", CHIPS)
def test_every_figure_has_a_source(kind: str):
    found = list(figures(CHIPS[kind]))
    assert len(found) >= 10
    for figure in found:
        assert figure.value > 0
        assert len(figure.source) > 10


@pytest.mark.parametrize("kind", CHIPS)
def test_peaks_are_those_that_runs_are_measured_by(kind: str):
    peak = published_peak(KINDS[kind])
    assert peak is not None
    assert CHIPS[kind].flops("bf16") == pytest.approx(peak.flops, rel=0.001)
    assert chips.chip_of_device(KINDS[kind]) is CHIPS[kind]


def test_other_devices_are_in_no_row():
    for name in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA L4", "TPU v3"):
        assert chips.chip_of_device(name) is None


def test_dtypes_run_on_the_units_they_have():
    h100, v5e = GPUS["h100"], TPUS["v5e"]
    assert h100.flops("f8e4m3fn") == pytest.approx(2 * h100.flops("bf16"), rel=0.001)
    assert h100.flops("bf16") == h100.flops("f16")
    assert h100.flops("f32") < h100.flops("tf32") < h100.flops("bf16")
    assert GPUS["a100"].flops("f8e5m2") == GPUS["a100"].flops("bf16")  # no units of its own
    assert v5e.flops("f16") == v5e.flops("bf16")
    assert v5e.flops("f64") == v5e.flops("f32") == v5e.flops("bf16") / 6


def test_programs_may_take_less_than_there_is():
    for kind, chip in CHIPS.items():
        assert 0.9 * chip.memory.value < chip.usable.value <= 1.01 * chip.memory.value, kind


def test_torus_dims_that_are_rings():
    v5p, v6e = TPUS["v5p"].inside, TPUS["v6e"].inside
    assert isinstance(v5p, Torus) and isinstance(v6e, Torus)  # noqa: PT018 narrows the types
    assert [v5p.is_ring(size) for size in (2, 4, 8, 12, 24)] == [False, True, True, True, True]
    assert [v6e.is_ring(size) for size in (4, 8, 16)] == [False, False, True]


def test_a_rack_of_gb200_is_one_domain():
    rack, node = GPUS["gb200"].inside, GPUS["h100"].inside
    assert isinstance(rack, Switch) and isinstance(node, Switch)  # noqa: PT018 narrows the types
    assert (rack.domain_size(4), node.domain_size(4), node.domain_size(8)) == (72, 4, 8)
