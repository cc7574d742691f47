"""The screen: one line that never wraps, plain lines without a terminal, the summary at the start."""

import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxtrain.reports.layout_table import logical_names, mesh_line, parameter_rows, parameter_table, unsharded_dims
from jaxtrain.trackers.console import (
    ConsoleTracker,
    Status,
    count,
    duration,
    event_line,
    live_line,
    number,
    percent,
    plain_line,
    short,
    small,
)

VALUES = {
    "loss": 2.34567, "lr": 2.98e-4, "grad_norm": 0.5234, "tokens_per_sec": 45123.0, "mfu": 0.4123,
    "data_wait": 0.001, "step_time": 0.3,
}  # fmt: skip
LONG = VALUES | {"loss": 11.2, "lr": 1e-10, "grad_norm": 1234.5, "tokens_per_sec": 123.4e6, "data_wait": 0.02}


def test_all_of_it_fits_in_80_columns():
    line = live_line(Status(1000, 120, VALUES, 0.3), 79).plain
    assert line.endswith(" 12% eta 4:24 loss 2.3457 lr 3.0e-4 |g| 0.52 45.1k tok/s mfu 41% wait 0.3%")
    assert re.match("━+─+ ", line)


def test_a_wide_line_counts_steps():
    line = live_line(Status(1000, 120, VALUES, 0.3), 119).plain
    assert " 120/1,000 eta 4:24 loss 2.3457 " in line
    assert len(line) == 119


@settings(max_examples=300)
@given(
    width=st.integers(1, 200),
    total=st.integers(1, 10**9),
    share=st.floats(0, 1.5),
    step_time=st.none() | st.floats(0, 1e6),
    values=st.dictionaries(st.sampled_from(sorted(VALUES)), st.none() | st.floats()),
)
def test_no_line_is_too_wide(width, total, share, step_time, values):
    assert len(live_line(Status(total, int(share * total), values, step_time), width).plain) <= width


def test_what_matters_least_goes_first():
    keys = ["loss", "eta", "tok/s", "mfu", "lr", "|g|", "wait"]
    seen = [[key for key in keys if f" {key}" in live_line(Status(99, 9, LONG, 1.0), w).plain] for w in range(20, 100)]
    assert all(shown == keys[: len(shown)] for shown in seen)
    assert seen[0] == ["loss"]
    assert seen[-1] == keys


def test_the_bubble_of_a_pipeline_is_shown():
    assert live_line(Status(10, 1, VALUES | {"bubble": 0.158}), 120).plain.endswith("bubble 16%")


def test_mfu_is_left_out_not_made_up():
    values = {key: value for key, value in VALUES.items() if key != "mfu"}
    assert "mfu" not in live_line(Status(10, 1, values), 79).plain
    assert "waiting for the first step" in live_line(Status(10), 79).plain


def recorded(width: int, live: bool, **kwargs) -> tuple[ConsoleTracker, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=live, color_system=None, legacy_windows=False)
    return ConsoleTracker(30, console=console, live=live, **kwargs), out


@pytest.mark.parametrize("width", [80, 120])
def test_live_on_a_terminal(width):
    screen, out = recorded(width, live=True)
    screen.start({"step": 0})
    for step in range(1, 31):
        screen.log(step, VALUES)
        if step == 10:
            screen.event("save", step=10, path="runs/x/10", seconds=0.5)
    screen.log(30, {"eval/loss": 1.0})  # does not touch the line
    screen.close()
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", out.getvalue())
    assert "step 10  save  path runs/x/10  seconds 0.5000" in text
    drawn = [line for line in re.split(r"[\r\n]", text) if "tok/s" in line]
    assert drawn
    assert all(len(line) < width for line in drawn)
    assert "loss 2.3457" in drawn[-1]


def test_plain_lines_without_a_terminal():
    now = [0.0]
    screen, out = recorded(80, live=False, clock=lambda: now[0])
    screen.start({"step": 5})
    for step in range(6, 31):
        now[0] += 1.0
        screen.log(step, VALUES)
    screen.event("stop", step=30, reason="done")
    screen.close()
    text = out.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    said = text.splitlines()
    assert said[0] == "resuming after step 5 of 30"
    assert [line.split()[1] for line in said if "tok/s" in line] == ["6/30", "16/30", "26/30", "30/30"]
    assert said[-1] == "step 30  stop  reason done"


def test_long_paths_and_brackets_are_printed_as_they_are():
    screen, out = recorded(80, live=False)
    path = "/very/long" * 12 + "/[bold]name"
    screen.event("save", step=1, path=path)
    assert f"path {path}\n" in out.getvalue()


def test_steps_resumed_and_smoothed():
    screen, _ = recorded(80, live=False)
    screen.log(1, {"loss": 1.0, "step_time": 1.0})
    screen.log(2, {"loss": 1.0, "step_time": 2.0})
    assert screen.status.step_time == pytest.approx(1.1)
    assert screen.status.eta == pytest.approx(28 * 1.1)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (duration(None), "-:--"), (duration(5), "0:05"), (duration(3725), "1:02:05"), (duration(9e5), "10d"),
        (number(None), "-"), (number(2.34567), "2.3457"), (number(123.456), "123.46"), (number(1e7), "1e+07"),
        (number(float("nan")), "nan"), (short(0.0), "0.00"), (short(123.0), "1.2e2"), (short(1e-5), "1.0e-5"),
        (small(3e-4), "3.0e-4"), (small(1.5e-12), "1.5e-12"), (count(999.0), "999"), (count(45123.0), "45.1k"),
        (count(999_999.0), "1M"), (count(1.234e6), "1.23M"), (count(2.5e13), "25T"),
        (percent(0.4123), "41%"), (percent(0.003), "0.3%"), (percent(0.0), "0%"), (percent(None), "-"),
    ],
)  # fmt: skip
def test_numbers(got, want):
    assert got == want


def test_lines():
    assert event_line("start", {}) == "start"
    assert event_line("eval", {"step": 1200, "loss": 2.5, "none": None}) == "step 1,200  eval  loss 2.5000"
    assert plain_line(Status(1000, 120, VALUES, 0.3)).startswith("step 120/1,000  eta 4:24  loss 2.3457  lr 3.0e-4")


class Leaf:
    def __init__(self, *shape: int, dtype: str = "float32"):
        self.shape, self.dtype = shape, np.dtype(dtype)


PARAMS = {"embed": {"table": Leaf(512, 256)}, "layers": {"q": Leaf(4, 256, 6, 64), "norm": Leaf(4, 256, dtype="int16")}}
NAMES = {
    "embed": {"table": ("vocab", "embed")},
    "layers": {"q": ("layers", "embed", "heads", "head_dim"), "norm": ("layers", None)},
}
SIZES = {"data": 2, "fsdp": 2, "model": 4}
RULES = {"embed": ("data", "fsdp"), "heads": ("model",), "vocab": ("model",)}


def rows():
    return parameter_rows(PARAMS, NAMES, lambda names, shape: [RULES.get(name, ()) for name in names], SIZES)


def test_tensors():
    table, q, norm = rows()
    assert (table.name, table.count, table.bytes) == ("embed/table", 512 * 256, 128 * 64 * 4)
    assert q.axes == ((), ("data", "fsdp"), ("model",), ())
    assert q.bytes == 4 * 64 * 2 * 64 * 4  # 6 heads on 4 devices: the fullest has 2
    assert (norm.name, norm.bytes) == ("layers/norm", 4 * 256 * 2)


def rendered(width: int, **kwargs) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(parameter_table(rows(), width, **kwargs))
    return console.file.getvalue()


def test_parameter_table():
    narrow, wide = rendered(80), rendered(120)
    assert len(narrow.splitlines()) == len(wide.splitlines()) == 5
    assert "layers/q" in narrow
    assert "4 256/data+fsdp 6/model 64" in narrow
    assert "393,216" in narrow
    assert "layers embed heads head_dim" in wide
    assert logical_names(rows(), 120) == []
    assert "logical names: layers embed heads head_dim: layers/q" in logical_names(rows(), 80)
    total = 512 * 256 + 4 * 256 * 6 * 64 + 4 * 256
    assert re.fullmatch(rf"total +{total:,} +162 KiB *", narrow.splitlines()[-1])


def test_the_reason_of_every_whole_dim():
    assert unsharded_dims(rows(), RULES, SIZES) == [
        "unsharded: layers: a scan takes the layers one by one",
        "unsharded: head_dim: no rule in the layout",
        "unsharded: layers/norm (dim 1): dims without a logical name",
    ]
    assert unsharded_dims(rows(), RULES, {"data": 1, "fsdp": 1, "model": 1}) == []
    (shared,) = parameter_rows(
        {"k": Leaf(8, 2)}, {"k": (None, "kv_shared")}, lambda names, shape: [("fsdp",), ()], SIZES
    )
    assert "repeated for use" in unsharded_dims([shared], RULES, SIZES)[0]
    (unequal,) = parameter_rows(
        {"w": Leaf(6, 8)}, {"w": ("layers", "embed")}, lambda names, shape: [(), ("fsdp",)], SIZES
    )
    (line,) = unsharded_dims([unequal], RULES | {"layers": ("pipeline",)}, SIZES)
    assert line == "unsharded: layers: the stages of pipeline do not divide them, and spread another dim"


def test_many_tensors_show_the_largest():
    text = rendered(80, most=1)
    assert "layers/q" in text
    assert "embed/table" not in text
    assert "total (and 2 smaller)" in text


def test_mesh_line():
    assert mesh_line("tp", SIZES | {"replica": 1}, "cpu") == "devices   16 x cpu, layout tp: data 2 x fsdp 2 x model 4"
    assert mesh_line("single", {"data": 1}, "cpu") == "devices   1 x cpu, layout single"


def test_texts_of_users_are_no_emoji(capsys):
    tracker = ConsoleTracker(1)
    tracker.print("data      mine:Symbols: tokens int32[24], in :symbols:")
    assert "mine:Symbols: tokens" in capsys.readouterr().out
