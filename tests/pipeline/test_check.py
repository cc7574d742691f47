"""A pipeline that can not run is refused before JAX starts, in one line that says what would be right."""

from __future__ import annotations

import pytest

from jaxtrain.config.load import load
from jaxtrain.core.layout_check import check_schedule

PP = ("layout=pp", "mesh.pipeline=4", "mesh.data=1", "step.microbatches=4", "model.layers=8", "model.vocab=256")


def problems(*changes: str) -> list[str]:
    return [str(problem) for problem in check_schedule(load(None, *PP, *changes), devices=4)]


def test_a_legal_pipeline():
    assert problems() == []
    assert problems("pipeline.schedule=zb_v") == []
    assert problems("model.layers=6") == []
    assert problems("mesh.pipeline=1", "mesh.data=4", "model.layers=7", "pipeline.schedule=nothing") == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["model.layers=3"], "model.layers: 3 layers are too few for 4 stages; expected at least 4"),
        (["model.layers=7", "pipeline.schedule=interleaved_1f1b"],
         "model.layers: 7 layers are too few for 4 stages of 2 chunks; expected at least 8"),
        (["model.sliding_window=8", "model.sliding_window_pattern=4"],
         "model.layers: 8 layers in groups of 4 are too few for 4 stages; expected at least 16"),
        (["model.layers=17", "model.sliding_window=8", "model.sliding_window_pattern=4"],
         "model.layers: 17 layers are not whole groups of 4, as stages need; expected e.g. 16 or 20 ("),
        (["model.layers=7", "model.sliding_window=8", "model.sliding_window_pattern=4"],
         "model.layers: 7 layers are not whole groups of 4, as stages need; expected e.g. 16 ("),
        (["pipeline.schedule=1f1bb"], "pipeline.schedule: no schedule `1f1bb` (did you mean `1f1b`"),
        (["pipeline.schedule=gpipe", "pipeline.virtual_stages=2"],
        "pipeline.virtual_stages: schedule gpipe: chunks: expected 1"),
        (["pipeline.schedule=/none/own.csv"], "pipeline.schedule: /none/own.csv: No such file or directory"),
        (["rules.layers=[]"], "rules.layers: the stages of mesh.pipeline hold layers; expected `layers: pipeline`"),
        (["rules.mlp=[pipeline]"], "rules.mlp: axis `pipeline` holds layers; expected it only in rules.layers"),
    ],
)  # fmt: skip
def test_a_problem_is_one_line(changes: list[str], line: str):
    (problem,) = problems(*changes)
    assert problem.startswith(line)
    assert "\n" not in problem


def test_a_ring_is_refused():
    changes = (
        "rules.context=[context]",
        "rules.sequence=[context]",
        "mesh.context=2",
        "mesh.pipeline=2",
        "context_parallel=ring",
    )
    assert problems(*changes) == [
        "context_parallel: a ring can not run within the stages of mesh.pipeline; expected ulysses or gather"
    ]


def test_a_custom_table_without_an_action_names_stage_and_microbatch(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("F0,F1,,,B0,B1\n,F0,F1,B0,,\n")
    lines = problems("mesh.pipeline=2", "mesh.data=2", "step.microbatches=2", f"pipeline.schedule={path}")
    assert lines
    assert all(line.startswith("pipeline.schedule: ") and "stage" in line and "microbatch" in line for line in lines)


def test_a_good_custom_table(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("F0,F1,,,B0,B1\n,F0,F1,B0,B1,\n")
    assert problems("mesh.pipeline=2", "mesh.data=2", "step.microbatches=2", f"pipeline.schedule={path}") == []
