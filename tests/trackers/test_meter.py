"""The step meter under a clock in the hand of the test."""

from types import SimpleNamespace

import pytest

from jaxtrain.models.flops import Flops
from jaxtrain.planning.hardware.peak import Peak
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.trackers.meter import Meter, device_memory, process_memory


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(**kwargs):
    clock = Clock()
    ledger = GoodputLedger(clock=clock)
    ledger.begin("compile")
    return clock, ledger, Meter(ledger, tokens=1000, devices=4, memory=lambda: 7, **kwargs)


def test_record_over_several_steps():
    clock, ledger, meter = make(flops=Flops(3e6, 4e6), peak=Peak(1e9, "test"))
    clock.now += 30
    assert meter.end_compilation(11) == 30
    for _ in range(5):
        with ledger.phase("data"):
            clock.now += 0.1
        clock.now += 0.4
    for pause in ("eval", "checkpoint"):
        with ledger.phase(pause):
            clock.now += 60
    record = meter.record(16, {"loss": 2.0, "tokens": 990.0})
    assert record == pytest.approx(
        {
            "step": 16, "loss": 2.0, "tokens": 16000, "tokens_per_sec": 2000, "tokens_per_sec_per_device": 500,
            "step_time": 0.5, "data_wait": 0.1, "mfu": 1.5, "hfu": 2.0, "memory": 7,
        }
    )  # fmt: skip
    clock.now += 1
    again = meter.record(17, {"loss": 1.0})
    assert (again["step_time"], again["data_wait"]) == (1, 0)


def test_first_record_has_no_rates_without_compiled():
    clock, _, meter = make()
    clock.now += 30
    assert meter.record(1, {"loss": 3.0}) == {"step": 1, "loss": 3.0, "tokens": 1000, "memory": 7}


def test_mfu_is_left_out_when_unknown():
    for kwargs in ({}, {"flops": Flops(1.0, None)}, {"peak": Peak(1.0, "test")}):
        clock, _, meter = make(**kwargs)
        meter.end_compilation(0)
        clock.now += 1
        assert not {"mfu", "hfu"} & set(meter.record(1, {}))
    clock, _, meter = make(flops=Flops(1e6, None), peak=Peak(1e9, "test"))
    meter.end_compilation(0)
    clock.now += 1
    record = meter.record(1, {})
    assert record["mfu"] == pytest.approx(0.25)
    assert "hfu" not in record


def test_memory():
    device = lambda **stats: SimpleNamespace(memory_stats=lambda: stats or None)  # noqa: E731
    assert device_memory([device(peak_bytes_in_use=5, bytes_in_use=1), device(peak_bytes_in_use=9)])() == 9
    assert device_memory([device(bytes_in_use=3)])() == 3
    read = device_memory([device()])()
    assert read is None or read == pytest.approx(process_memory(), rel=0.5)
