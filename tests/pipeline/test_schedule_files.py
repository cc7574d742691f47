"""Tables from files: read as written, or refused with an error that names stage and tick."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_reference import cells, faults
from test_schedule import tables

from jaxtrain.errors import ScheduleError
from jaxtrain.pipeline.schedules.files import load_table
from jaxtrain.pipeline.schedules.shipped import shipped_table

TWO_STAGES = ["F0,F1,,B0,,B1", ",F0,B0,F1,B1,"]
SPLIT = ["F0,F1,,B0,W0,B1,W1", ",F0,B0,F1,B1,W0,W1"]


def rows(table, split_letter="B"):
    """Returns the cells as text, a list for each stage."""
    grid = [["" for _ in range(table.ticks)] for _ in range(table.stages)]
    for (tick, stage), (letter, microbatch, chunk) in cells(table).items():
        letter = split_letter if letter == "BW" else letter
        grid[stage][tick] = f"{letter}{microbatch}" + (f".{chunk}" if chunk else "")
    return grid


def write(folder, lines, name="own.csv"):
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def refusal(folder, lines, *size, name="own.csv"):
    path = write(folder, lines, name)
    with pytest.raises(ScheduleError) as error:
        load_table(path, *size)
    assert all(line.startswith(f"{path}: ") for line in str(error.value).splitlines())
    return str(error.value).replace(f"{path}: ", "")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables(), st.booleans())
def test_shipped_schedules_come_back_from_files(tmp_path, table, is_csv):
    if is_csv:
        path = write(tmp_path, [f"# placement: {table.placement}", *map(",".join, rows(table))])
    else:
        content = {"placement": table.placement, "stages": rows(table, "BW")}
        path = write(tmp_path, [yaml.safe_dump(content)], "own.yaml")
    back = load_table(path, table.stages, table.microbatches, table.chunks)
    assert back.placement == table.placement
    for name in ("action", "microbatch", "chunk"):
        np.testing.assert_array_equal(getattr(back, name), getattr(table, name))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables(), st.randoms())
def test_a_damaged_table_is_refused_with_its_position(tmp_path, table, chance: random.Random):
    grid = rows(table, "BW" if table.is_split else "B")
    stage, other = chance.randrange(table.stages), chance.randrange(table.stages)
    tick, later = sorted(chance.randrange(table.ticks) for _ in range(2))
    damage = chance.choice(["drop", "swap", "copy", "shift"])
    if damage == "drop":
        grid[stage][tick] = ""
    elif damage == "swap":
        grid[stage][tick], grid[stage][later] = grid[stage][later], grid[stage][tick]
    elif damage == "copy":
        grid[other][tick] = grid[stage][later]
    else:
        grid[stage] = [*grid[stage][tick:], *[""] * tick]
    damaged = _as_table(table, grid)
    lines = [f"# placement: {table.placement}", *map(",".join, grid)]
    if not faults(damaged):
        load_table(write(tmp_path, lines), table.stages, table.microbatches, table.chunks)
        return
    message = refusal(tmp_path, lines, table.stages, table.microbatches, table.chunks)
    named = re.compile(r"stage \d+.*microbatch \d+.*(tick|in all)|missing in the table|no actions|the table has")
    assert all(named.search(line) or "more" in line for line in message.splitlines())


def _as_table(table, grid):
    """Returns the damaged cells as a table for the reference."""
    copies = [getattr(table, name).copy() for name in ("action", "microbatch", "chunk")]
    for stage, row in enumerate(grid):
        for tick, text in enumerate(row):
            match = re.fullmatch(r"(F|BW|B|W)(\d+)\.?(\d*)", text)
            letter = {"B": "B" if table.is_split else "BW"}.get(match[1], match[1]) if match else ""
            cell = (["", "F", "B", "W", "BW"].index(letter), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)
            for array, value in zip(copies, cell):
                array[tick, stage] = value
    return type(table)(table.name, table.placement, table.microbatches, table.chunks, *copies)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["F0,F1,,B0,,B1", "F0,,B0,F1,B1,"], "stage 1, tick 0, microbatch 0: F needs the F of stage 0, which is done "
         "at tick 0; expected F at tick 1 or later"),
        (["F0,F1,B0,,,B1", ",F0,B0,F1,B1,"], "stage 0, tick 2, microbatch 0: B needs the B of stage 1, which is done "
         "at tick 2; expected B at tick 3 or later"),
        (["F0,F1,,B0,,", ",F0,B0,F1,B1,"], "stage 0, microbatch 1: B is missing in all 5 ticks; expected it "
         "once at tick 5 or later"),
        (["F0,F1,,B0,W0,B1,", ",F0,B0,F1,B1,W0,W1"], "stage 0, microbatch 1: W is missing in all 7 ticks"),
        (["F0,F1,F1,B0,,B1", ",F0,B0,F1,B1,"], "stage 0, tick 2, microbatch 1: F is done at tick 1 already"),
        (["F0,F1 B0,,,,B1", ",F0,B0,F1,B1,"], 'stage 0, tick 1: "F1 B0" is 2 actions; expected one a tick'),
        (["F0,G1,,B0,,B1", ",F0,B0,F1,B1,"], 'stage 0, tick 1: expected a cell such as F3, B3, W3, F3.1 or nothing; '
         'found "G1"'),
        (["F0,F2,,B0,,B2", ",F0,B0,F2,B2,"], "microbatch 1 is missing in the table; expected every one of 0 to 1"),
        (["F0,F999999,,B0,,B1", ",F0,B0,F1,B1,"], "microbatch 2 is missing"),
        ([",,,", ","], "no actions"),
        ([""], "no actions"),
        (["# peak: 1", *TWO_STAGES], "stage 0, tick 1, microbatch 1: keeps the activations of 2 microbatches"),
        (["# peak: none", *TWO_STAGES], 'peak: expected a number above 0; found "none"'),
        (["# placement: w", *TWO_STAGES], 'placement: expected loop or v; found "w"'),
        (["# microbatches: 3", *TWO_STAGES], "microbatch 2 is missing in the table; expected every one of 0 to 2"),
        (["# microbatches: 1", *TWO_STAGES], "stage 0, tick 1, microbatch 1: expected a microbatch of 0 to 0"),
    ],
)  # fmt: skip
def test_refusals_of_a_csv(tmp_path, lines, message):
    assert message in refusal(tmp_path, lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["stages: 3"], "expected a key `stages`"),
        (["- F0"], "expected a key `stages`"),
        (["stages: [F0 B0]", "microbatch: 1"], "did you mean `microbatches`"),
        (["stages: [F0 B0, 7]"], "stages: stage 1: expected a list of cells; found 7"),
        (["stages: [F0 B0", "x: y"], "line 2: not YAML"),
        (["stages: [F0 B0]", "peak: true"], "peak: expected a number above 0; found true"),
    ],
)
def test_refusals_of_yaml(tmp_path, lines, message):
    assert message in refusal(tmp_path, lines, name="own.yaml")


@pytest.mark.parametrize(
    ("size", "message"),
    [((3, 2, 1), "stages: the table has 2; expected 3"), ((2, 8, 1), "microbatches: the table has 2; expected 8"),
     ((2, 2, 2), "chunks: the table has 1; expected 2")],
)  # fmt: skip
def test_a_table_of_another_size(tmp_path, size, message):
    assert message in refusal(tmp_path, TWO_STAGES, *size)


def test_contents_of_a_file(tmp_path):
    fused, split = load_table(write(tmp_path, TWO_STAGES)), load_table(write(tmp_path, ["# peak: 2", *SPLIT]))
    assert (fused.is_split, split.is_split) == (False, True)
    assert (fused.ticks, split.ticks, split.stages, split.microbatches) == (6, 7, 2, 2)
    mixed = load_table(write(tmp_path, ["F0,F1,BW0,B1,W1"]))
    assert [int(action) for action in mixed.action[:, 0]] == [1, 1, 4, 2, 3]
    assert load_table(write(tmp_path, ["stages:", "  - F0 F0.1 . B0.1 B0", "placement: v"], "own.yml")).chunks == 2
    assert load_table("zb_v", 2, 4).ticks == shipped_table("zb_v", 2, 4).ticks


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_table(str(tmp_path / "none.csv"))
    (tmp_path / "own.csv").write_bytes(b"F0,\xff")
    with pytest.raises(ScheduleError, match="UTF-8"):
        load_table(str(tmp_path / "own.csv"))
