"""The page of a plan: well formed, complete, to scale, and sound with any text in it."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from plan_examples import fitting, refused, simulated

from jaxtrain.planning.report import page, plots
from jaxtrain.planning.result import Advice, Plan

HOSTILE = "<script>alert('x')</script> & \"quoted\""


def parsed(text: str) -> ElementTree.Element:
    """The page as XML, which is stricter than HTML."""
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def words(text: str) -> str:
    return " ".join("".join(parsed(text).itertext()).split())


def rectangles(svg: str) -> list[dict[str, str]]:
    return [node.attrib for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("rect")]


@pytest.mark.parametrize("plan", [fitting(), simulated(), refused()], ids=["fits", "simulated", "refused"])
def test_a_page_needs_nothing_else(plan: Plan):
    text = page.page(plan, "my.yaml")
    parsed(text)
    addresses = set(re.findall(r"https?://[^\"' <]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|src=", text)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"\bNone\b|\bnan\b", words(text))


def test_a_page_has_the_figures():
    text = words(page.page(fitting(), "my.yaml"))
    for figure in (
        "40.00 GB of 79.00 GB", "1.00 s", "500,000", "30.0%", "2.00 days", "768 device-hours", "all-gather",
        "InfiniBand", "opt_state/mu/layers/mlp/down", "bf16[32,16,512,4096]", "+16% tokens/s", "step.remat=none",
        "300 TFLOP", "offloaded to the host", "a loop of unknown length counts once", "989 TFLOP/s",
    ):  # fmt: skip
        assert figure in text


def test_text_of_others_is_escaped():
    hostile = fitting(
        device=HOSTILE, layout=HOSTILE, bottleneck=HOSTILE, notes=(HOSTILE,), tensors=((HOSTILE, 5),),
        buffers=((HOSTILE, HOSTILE, 5),), advice=(Advice(HOSTILE, 0.1, HOSTILE),),
        seconds_by={"kind": {HOSTILE: 0.5}, "phase": {HOSTILE: 0.5}},
    )  # fmt: skip
    text = page.page(hostile, HOSTILE)
    assert "<script" not in text
    assert words(text).count("alert('x')") >= 10


def test_memory_is_drawn_to_scale():
    bars = {bar["class"]: bar for bar in rectangles(plots.memory(fitting()))}
    widths = {kind: float(bars[kind]["width"]) for kind in ("params", "optimizer", "activations")}
    assert widths["optimizer"] == pytest.approx(4 * widths["params"], rel=0.02)
    assert widths["activations"] == pytest.approx(12 * widths["params"], rel=0.02)
    ends = float(bars["batch"]["x"]) + float(bars["batch"]["width"])
    lines = re.findall(r'class="limit" x1="([\d.]+)"', plots.memory(fitting()))
    start = float(bars["track"]["x"])
    assert (ends - start) / (float(lines[0]) - start) == pytest.approx(40 / 78.997, rel=0.01)
    large = plots.memory(fitting(needs=160_000_000_000, fits=False))
    assert float(re.findall(r'class="limit" x1="([\d.]+)"', large)[0]) < 0.55 * plots.WIDTH


def test_times_follow_one_another_and_add_up():
    bars = rectangles(plots.time(fitting()))
    assert [bar["class"] for bar in bars] == ["compute", "compute", "communication", "bubble"]
    for bar, following in pairwise(bars):
        assert float(bar["x"]) + float(bar["width"]) == pytest.approx(float(following["x"]), abs=0.2)
    assert float(bars[0]["width"]) == pytest.approx(5 * float(bars[3]["width"]), rel=0.02)


def test_a_roofline_is_flat_from_the_ridge_on():
    svg = plots.roofline(fitting())
    points = re.search(r'class="roof" points="([^"]+)"', svg)
    assert points is not None
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in points[1].split())
    assert y1 == y2
    assert x0 < x1 < x2
    assert y0 > y1
    field = plots.LogAxes(1.0, 10**4, 989.4e12 / 1000, 4 * 989.4e12)
    assert x1 == pytest.approx(field.x(989.4e12 / 3.35232e12), abs=0.1)
    assert "computing: 573 TFLOP/s" in svg  # 401 TFLOP in 0.7 s
    assert "the whole step: 401 TFLOP/s" in svg
    assert plots.roofline(simulated()) == ""


def test_labels_stay_on_the_plot():
    for plan in (fitting(), simulated()):
        for svg in filter(None, (plots.memory(plan), plots.time(plan), plots.roofline(plan))):
            for node in ElementTree.fromstring(svg).iter():
                if node.tag.endswith("text"):
                    wide, x = plots.LETTER_WIDTH * len(node.text or ""), float(node.attrib["x"])
                    left = {"start": x, "middle": x - wide / 2, "end": x - wide}[node.attrib["text-anchor"]]
                    assert left >= -1, node.text
                    assert left + wide <= plots.WIDTH + 1, node.text


def test_parts_of_a_step_stand_where_their_flops_and_bytes_say():
    work = {"flops_by": {"part": {"layers": 3e14, "loss": 1e12}}, "bytes_by": {"part": {"layers": 1e12, "loss": 1e9}}}
    svg = plots.roofline(fitting(**work))
    field = plots.LogAxes(1.0, 10**4, 989.4e12 / 1000, 4 * 989.4e12)
    found = [tuple(map(float, point)) for point in re.findall(r'class="point" cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert len(found) == 2
    assert (pytest.approx(field.x(300), abs=0.1), pytest.approx(field.y(3e14 / 0.6), abs=0.1)) in found
    assert "layers: 500 TFLOP/s" in svg
