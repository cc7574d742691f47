"""`jaxtrain report`: on 80 columns, as one page that needs nothing else, as JSON; sound with any text in it."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "observe"))
from run_examples import Folder, three_attempts

from jaxtrain.cli.commands.report import braille, columns, report
from jaxtrain.cli.main import main
from jaxtrain.io import svg
from jaxtrain.reports import page as report_page
from jaxtrain.reports import plots, tables
from jaxtrain.reports.history import read_history

HOSTILE = "<script>alert('x')</script> & \"quoted\" [red]\x1b[31m"


def text_of(run, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(report(run, width))
    return console.file.getvalue()


def parsed(text: str) -> ElementTree.Element:
    """The page as XML, which is stricter than HTML."""
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def test_on_the_terminal(tmp_path):
    three_attempts(tmp_path / "runs/mine")
    text = text_of(read_history(tmp_path / "runs/mine"))
    for said in (
        "my run", "finished", "43%", "4:40 min of wall time", "30 of 30", "2 restarts", "0.1667", "0.2500 at step 30",
        "1.02k tok/s", "11 over the whole time", "100.0 ms", "10.0 ms waiting for data", "40%",
    ):  # fmt: skip
        assert said in text, said
    spent = text.partition("where the time went")[2].partition("loss  steps")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", spent)]
    assert sum(shares) == pytest.approx(100, abs=2)
    ends = text.partition("starts and ends")[2]
    assert re.search(r"1-15 +1:40 min +60% +20 s +killed", ends)
    assert "hung in data" in " ".join(ends.split())
    assert "cannot be deleted" in ends
    assert re.search(r"10 +0.5 MiB +0.25 +0.01", ends)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_line_fits(tmp_path, width):
    three_attempts(tmp_path)
    lines = text_of(read_history(tmp_path), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "4:40 min" in " ".join(lines)


def test_a_run_that_has_only_begun(tmp_path):
    Folder(tmp_path).event(0, "start", step=0, name="young", steps=10)
    run = read_history(tmp_path)
    assert "goodput unknown" in text_of(run)
    parsed(report_page.page(run))


def test_a_page_needs_nothing_else(tmp_path):
    three_attempts(tmp_path)
    text = report_page.page(read_history(tmp_path))
    words = " ".join("".join(parsed(text).itertext()).split())
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|src=", text)
    assert not re.search(r"\bNone\b|\bnan\b", words)
    assert text.count("<svg") == 5  # time, loss, rate, throughput, attempts
    for said in ("my run: report", "42.9%", "steps done again after a restart", "killed", "0.2500"):
        assert said in words, said


def test_text_of_others_is_escaped(tmp_path):
    folder = three_attempts(tmp_path, HOSTILE)
    folder.event(281, "resume", step=30, name=HOSTILE, steps=40)
    folder.event(282, "skipped", step=30, why=HOSTILE)
    folder.event(283, "stop", step=31, reason=HOSTILE)
    run = read_history(tmp_path)
    page = report_page.page(run)
    assert "<script" not in page
    assert "".join(parsed(page).itertext()).count("alert('x')") >= 4
    text = text_of(run)
    assert "\x1b" not in text
    assert "[red]" in text


def test_metrics_of_a_user_are_shown_and_their_names_escaped(tmp_path):
    folder = three_attempts(tmp_path)
    folder.steps(31, 40, **{"accuracy": 0.625, HOSTILE: 1.5, "eval/accuracy": 0.5})
    run = read_history(tmp_path)
    page, text = report_page.page(run), text_of(run)
    words = " ".join("".join(parsed(page).itertext()).split())
    assert page.count("<svg") == 7
    assert "accuracy 0.6250 first 0.6250" in " ".join(text.split())
    assert "accuracy" in words
    assert "<script" not in page
    assert "\x1b" not in text + page


def test_steps_far_above_the_median_are_named_the_slowest_first(tmp_path):
    folder = three_attempts(tmp_path)
    unusual = {42: (0.301, 0.0), 44: (2.5, 2.4), 46: (0.2, 0.111), 48: (0.3, 0.0), 50: (0.15, 0.109)}
    for step in range(31, 60):
        took, wait = unusual.get(step, (0.1, 0.01))
        folder.steps(step, step, step_time=took, data_wait=wait)
    run = read_history(tmp_path)
    expected = [("44", "2,500.0 ms", "2,400.0 ms"), ("42", "301.0 ms", "0.0 ms"), ("46", "200.0 ms", "111.0 ms")]
    text = text_of(run).partition("slowest steps")[2].partition("loss  steps")[0]
    note, titles, *lines = [line.strip() for line in text.strip().splitlines()]
    assert note == "of 59 logged steps"
    assert titles.split() == ["step", "step", "time", "of", "it", "waiting", "for", "data"]
    assert [tuple(re.split(" {2,}", line)) for line in lines] == expected
    page = parsed(report_page.page(run))
    (section,) = [node for node in page.iter("section") if node.findtext("h2") == "Slowest steps"]
    assert [tuple(cell.text for cell in row) for row in section.find(".//tbody")] == expected
    assert section.findtext("p") == "Of 59 logged steps."


def test_no_more_than_five_slow_steps_are_named(tmp_path):
    folder = three_attempts(tmp_path)
    for step in range(31, 39):
        folder.steps(step, step, step_time=float(step))
    assert [row[0] for row in tables.slow_steps(read_history(tmp_path))] == ["38", "37", "36", "35", "34"]


@pytest.mark.parametrize("wait", [0.01, 0.099])
def test_a_run_of_even_steps_has_no_slow_ones(tmp_path, wait):
    folder = three_attempts(tmp_path)
    for step in range(31, 200):  # also where each waits for data
        folder.steps(step, step, step_time=0.1 + step % 3 / 100, data_wait=wait + step % 3 / 100)
    run = read_history(tmp_path)
    assert "slowest steps" not in text_of(run)
    assert "Slowest steps" not in report_page.page(run)


def test_times_of_steps_that_are_not_all_logged_are_said_to_be_means(tmp_path):
    folder = Folder(tmp_path)
    folder.event(0, "start", step=0, name="rare", steps=40)
    for step, seconds in ((10, 0.1), (20, 0.1), (30, 0.4), (40, 0.1)):
        folder.steps(step, step, step_time=seconds)
    folder.steps(41, 41, step_time=None, data_wait=None)  # the first one of a resumed run has no time
    text = " ".join(text_of(read_history(tmp_path)).split())
    assert "slowest steps of 4 logged steps; times are means since the logged step before" in text
    assert "30 400.0 ms 10.0 ms" in text


def test_the_bar_of_all_time_is_to_scale(tmp_path):
    three_attempts(tmp_path)
    bars = {
        node.attrib["class"]: float(node.attrib["width"]) for node in parsed(plots.time_bar(read_history(tmp_path)))
    }
    assert bars["compute"] == pytest.approx(12 * bars["checkpoint"], rel=0.02)
    assert sum(bars.values()) == pytest.approx(svg.WIDTH - 20, abs=0.5)


def test_attempts_lie_where_they_were_in_time(tmp_path):
    three_attempts(tmp_path)
    nodes = [n for n in parsed(plots.timeline(read_history(tmp_path))) if n.tag.endswith("rect")]
    rows: dict[str, list[tuple[float, float]]] = {}
    for node in nodes:
        rows.setdefault(node.attrib["y"], []).append((float(node.attrib["x"]), float(node.attrib["width"])))
    unit = (plots.RIGHT - plots.LEFT) / 280
    spans = [(min(x for x, _ in row), sum(wide for _, wide in row)) for row in rows.values()]
    expected = [(plots.LEFT + unit * begin, unit * lived) for begin, lived in ((0, 100), (120, 49), (180, 100))]
    assert spans == [pytest.approx(pair, abs=0.5) for pair in expected]


def test_a_curve_goes_through_its_values(tmp_path):
    three_attempts(tmp_path)
    drawn = plots.curve(read_history(tmp_path), "loss", "loss")
    (line,) = re.findall(r'class="curve" points="([^"]+)"', drawn)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) == 30
    heights = [y for _, y in points]
    assert heights == sorted(heights)  # the loss falls
    share = (heights[1] - heights[0]) / (heights[-1] - heights[0])
    assert share == pytest.approx((5 - 2.5) / (5 - 5 / 30), abs=0.01)
    assert drawn.count('class="restart"') == 2


def test_long_curves_are_small():
    points = [(float(step), value) for step, value in enumerate([1.0, 3.0] * 50_000)]
    thin = plots.downsample(points, 600)
    assert len(thin) <= 600
    assert [value for _, value in thin] == pytest.approx([2.0] * len(thin), abs=0.02)


def test_columns_are_means_or_lie_between():
    assert columns([(1, 2.0), (3, 6.0)], 5) == [2, 3, 4, 5, 6]
    assert columns([(step, float(step % 2)) for step in range(1000)], 10)[:9] == pytest.approx([0.5] * 9, abs=0.02)
    assert columns([(5, 1.0)], 10) == [1.0]


def test_a_curve_of_dots():
    assert braille([1.0, 0.0], 1) == ["⢁"]
    assert braille([0.0, 0.0, 0.0], 2) == ["⠉⠁", ""]
    assert braille([0.0, 7.0], 2) == ["⠈", "⡀"]


def test_the_command_writes_what_is_asked_for(tmp_path, capsys):
    three_attempts(tmp_path / "run")
    files = {name: str(tmp_path / f"out.{name}") for name in ("html", "json")}
    assert main(["report", str(tmp_path / "run"), "--html", files["html"], "--json", files["json"]]) == 0
    shown = capsys.readouterr()
    assert "where the time went" in shown.out
    assert all(file in shown.err for file in files.values())
    assert json.loads(Path(files["json"]).read_text())["state"] == "finished"
    parsed(Path(files["html"]).read_text().rstrip())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nowhere"], "not a run"), (["run", "--html", "nowhere/x.html"], "no folder nowhere")],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    three_attempts(tmp_path / "run")
    assert main(["report", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_values_of_one_step_alone_are_no_curve():
    """A step may be validated twice: by the loop, and by its caller."""
    assert plots.curves({"a": [(3, 1.0), (3, 2.0)], "b": []}, "loss") == ""
    assert "line-0" in plots.curves({"a": [(3, 1.0), (3, 2.0)], "c": [(3, 1.0), (4, 2.0)]}, "loss")
