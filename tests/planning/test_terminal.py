"""Plan on a terminal: its text, its width, and unknown figures."""

from __future__ import annotations

import pytest
from plan_examples import fitting, refused, simulated
from rich.console import Console

from jaxtrain.planning.report import terminal, values
from jaxtrain.planning.result import Plan


def shown(plan: Plan, width: int = 80) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(terminal.report(plan, "my.yaml layout=tp", width))
    return capture.get()


def line_of(text: str, start: str) -> list[str]:
    """Words of the only line that starts so."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.split()


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("plan", [fitting(), simulated(), refused()], ids=["fits", "simulated", "refused"])
def test_every_line_fits_and_no_figure_is_cut(plan: Plan, width: int):
    text = shown(plan, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert not any(word in text for word in ("None", "nan", "inf "))
    for row in plan.traffic:
        assert row.op in text
        assert f"{row.bytes / 1e9:.2f}" in text


def test_the_headline():
    text = shown(fitting())
    assert "my.yaml layout=tp  on h100:2x8 (16 x NVIDIA H100 80GB HBM3)" in text
    assert "FITS  40.00 GB of 79.00 GB usable (51%)" in text
    assert line_of(text, "step time")[2:4] == ["1.00", "s"]
    assert line_of(text, "tokens/s")[1:] == ["500,000", "31,250", "a", "device"]
    assert "30.0%" in line_of(text, "MFU")
    assert "2.00 days" in text  # 172,800 steps of a second
    assert "768 device-hours" in text
    assert "86.4B tokens" in text


def test_memory_by_kind_against_the_chip():
    text = shown(fitting())
    assert line_of(text, "parameters")[:3] == ["parameters", "2.00", "2.5%"]
    assert line_of(text, "optimizer state")[2:4] == ["8.00", "10.1%"]
    assert line_of(text, "free")[1:3] == ["39.00", "49.4%"]
    assert "5.00" in line_of(text, "offloaded to the host")
    assert "PCIe 64 GB/s one way" in shown(fitting(), 200)
    assert "79.00 GB (73.6 GiB), of 84.94 GB (79.1 GiB)" in text
    small = shown(fitting(needs=20_000_000, memory={"params": 20_000_000}))
    assert line_of(small, "parameters")[:2] == ["parameters", "20.00"]  # MB
    assert "FITS  20.00 MB of 79.00 GB usable" in small
    blocks = [line.count("█") for line in text.splitlines() if line.startswith(("activations", "optimizer"))]
    assert blocks[1] == pytest.approx(3 * blocks[0], abs=2)


def test_communication_time_and_advice():
    text = shown(fitting(), 140)
    assert line_of(text, "model  NVLink") == [
        "model",
        "NVLink",
        "all-gather",
        "194",
        "90.00",
        "250.00",
        "20%",
        "200.00",
    ]
    assert line_of(text, "total") == ["total", "234", "92.00", "290.00", "31%", "200.00"]
    assert line_of(text, "waiting for axis model")[4:6] == ["0.20", "20.0%"]
    assert line_of(text, "pipeline bubble")[2:4] == ["0.10", "10.0%"]
    assert "waiting for axis fsdp" not in text  # all of it is hidden
    assert "+33.3% by recomputation (remat)" in text
    assert "+16% tokens/s  step.remat=none: 39 GB are left" in text
    assert "bottleneck  matrix multiplications: 50% of the step" in text
    assert "programs reach of these: matmuls 62%" in " ".join(text.split())
    assert "a loop of unknown length counts once" in text


def test_unknown_figures_have_a_reason():
    text = shown(simulated(), 140)
    assert "FIT UNKNOWN  needs 40.00 GB; the memory of cpu is unknown" in text
    assert line_of(text, "step time")[2] == "unknown"
    assert "the network between 16 x cpu is unknown" in text
    assert line_of(text, "model  host")[-3:] == ["-", "-", "-"]
    assert "days" not in text
    uncounted = shown(fitting(mfu=None, hfu=None, flops_model=None, flops_hardware=None))
    assert "the FLOPs of this model are unknown" in " ".join(line_of(uncounted, "MFU"))


def test_a_step_that_does_not_fit_shows_its_needs():
    text = shown(refused(), 140)
    assert "DOES NOT FIT  needs 129.00 GB of 16.91 GB usable; Ran out of memory on HBM" in text
    assert "tokens/s" not in text
    large = fitting(fits=False, needs=90_000_000_000, reason="needs 90.0 GB of 79.0 GB")
    assert "DOES NOT FIT  needs 90.0 GB of 79.0 GB" in shown(large)
    assert line_of(shown(large), "activations")[2:4] == ["24.00", "30.4%"]  # where the memory would go is still told


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (values.format_seconds(0.0123), "12.30 ms"),
        (values.format_seconds(None), "unknown"),
        (values.format_bytes(5e6), "5.00 MB"),
        (values.format_bytes(3e8), "0.30 GB"),
        (values.Unit("GB", 1e9).number(7), "<0.01"),
        (values.Unit("GB", 1e9).number(0), "0.00"),
        (values.format_si(4.53e15, "FLOP"), "4.53 PFLOP"),
        (values.format_count(10.5e9), "10.5B"),
        (values.format_days(1.5 / 24), "1.50 hours"),
        (values.format_days(10 / 86400), "10.00 s"),
    ],
)
def test_units(said: str, expected: str):
    assert said == expected
