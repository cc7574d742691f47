"""Drawings of tables, and the command `jaxtrain schedule`."""

from __future__ import annotations

import re

import matplotlib.image
import pytest
from schedule_reference import cells
from test_schedule import SCHEDULES

from jaxtrain.cli.main import main
from jaxtrain.pipeline.schedules import draw
from jaxtrain.pipeline.schedules.cost import Costs
from jaxtrain.pipeline.schedules.shipped import shipped_table


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(line):
        code = main(["schedule", *line.split()])
        out = capsys.readouterr()
        return code, out.out.splitlines(), out.err.strip()

    return run


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("width", [40, 80, 500])
def test_the_grid_has_every_cell_and_fits(name, width):
    table = shipped_table(name, 3, 5)
    lines = [line.plain for line in draw.text_grid(table, width)]
    assert max(map(len, lines)) <= width
    for stage in range(3):
        shown = [word for line in lines if line.startswith(f"stage {stage}") for word in line.split()[2:]]
        named = {(at, where): step for (at, where), step in cells(table).items() if where == stage}
        expected = [named.get((tick, stage)) for tick in range(table.ticks)]
        letters = {"BW": "B"}
        assert shown == [
            f"{letters.get(step[0], step[0])}{step[1]}{chr(39) * step[2]}" if step else "·" for step in expected
        ]


def test_a_long_grid_is_truncated_with_a_note():
    lines = [line.plain for line in draw.text_grid(shipped_table("1f1b", 2, 200), 80)]
    assert len(lines) == 3 * draw.MAX_BANDS + 1
    hidden = int(re.search(r"(\d+) more ticks", lines[-1])[1])
    assert sum(len(line.split()) - 2 for line in lines if line.startswith("stage 0")) == 402 - hidden


def test_boxes_start_and_end_at_the_times_of_their_actions(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    table = shipped_table("1f1b", 2, 2)
    draw.save_chart([table], Costs(1, 1.5, 0.5), tmp_path / "x.svg")
    lockstep, asynchronous = figures[0].axes
    spans = []
    for axes in (lockstep, asynchronous):
        boxes = [path.get_extents() for path in axes.collections[0].get_paths()]
        spans.append(sorted((round(box.y0 + 0.42), box.x0, box.x1) for box in boxes))
    # Ticks: F | F F | B F | B B ... in lockstep a tick with a backward takes 2.
    assert spans[0] == [(0, 0, 1), (0, 1, 2), (0, 4, 6), (0, 8, 10), (1, 1, 2), (1, 2, 4), (1, 4, 5), (1, 6, 8)]
    assert spans[1] == [(0, 0, 1), (0, 1, 2), (0, 4, 6), (0, 7, 9), (1, 1, 2), (1, 2, 4), (1, 4, 5), (1, 5, 7)]
    assert "time 10, bubble 40.0%" in lockstep.get_title(loc="left")
    assert [text.get_text() for text in lockstep.texts] == list("01000111")


def test_the_command_prints_and_draws(command, tmp_path):
    code, lines, _ = command("zb_v --stages 4 --microbatches 8")
    assert code == 0
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "51 ticks" in text
    assert re.search(r"lockstep +25\.5 +5\.9%", text)
    assert re.search(r"longest stage +24 +0\.0%", text)
    assert "peak activations: 4 microbatches" in text
    assert lines[-1] == "chart: zb_v.svg"
    assert (tmp_path / "zb_v.svg").read_text().count("<path") > 100


def test_compare_lists_all_schedules(command, tmp_path):
    code, lines, _ = command("--compare --stages 4 --microbatches 8 --costs 1,2,1 --out all.png")
    assert code == 0
    assert [line.split()[0] for line in lines[2:-1]] == list(SCHEDULES)
    row = next(line for line in lines if line.startswith("zb_h1")).split()
    assert row[1] == "27"
    assert row[-2:] == ["4", "48"]
    assert all(len(line) <= 80 for line in lines)
    image = matplotlib.image.imread(tmp_path / "all.png")
    assert image.shape[0] > 1000
    assert image.std() > 0.05


def test_the_command_takes_a_table(command, tmp_path):
    (tmp_path / "own.csv").write_text("F0,F1,,B0,,B1\n,F0,B0,F1,B1,\n")
    code, lines, _ = command("own.csv --out own.png")
    assert code == 0
    assert "own: 2 stages, 2 microbatches: 6 ticks, 4 sends" in lines
    assert (tmp_path / "own.png").exists()
    _, lines, _ = command("own.csv --compare")
    assert [line.split()[0] for line in lines[2:]] == ["own", *SCHEDULES]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("zbv", "did you mean `zb_v`"),
        ("zbv --compare", "did you mean `zb_v`"),
        ("1f1b --stages 0", "stages: expected at least 1"),
        ("1f1b --costs 1,2", "--costs: expected three numbers above 0"),
        ("1f1b --costs 1,2,nan", "--costs"),
        ("1f1b --out x.pdf", "ends with .svg or .png"),
        ("", "expected the name of a schedule"),
        ("bad.csv", "stage 1, tick 0, microbatch 0: F needs the F of stage 0"),
    ],
)
def test_bad_input_is_one_line(command, tmp_path, line, message):
    (tmp_path / "bad.csv").write_text("F0,,B0\nF0,B0,\n")
    code, lines, error = command(line)
    assert (code, lines) == (2, [])
    assert message in error
    assert "\n" not in error
