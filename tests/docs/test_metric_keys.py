"""The table of metrics.jsonl in docs/how-to.md has every key that the trainer writes, and no other."""

from __future__ import annotations

import json
import re

import pytest
from pages import ROOT

import jaxtrain
from jaxtrain.core.step import STEP_METRICS
from jaxtrain.trackers.console import TRAINER_METRICS

TERMS = {"cross_entropy", "z_loss", "balance", "router_z"}  # of losses that the package has
MODEL = {"moe/load_max", "moe/load_min", "moe/dropped"}


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """Keys of the first column; those with a part in capitals are patterns."""
    section = (ROOT / "docs/how-to.md").read_text().partition("## Read metrics.jsonl\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


def test_the_table_has_the_keys_of_the_trainer_and_no_other(keys):
    named = {key for key in keys if key.islower()}
    assert named == TRAINER_METRICS | STEP_METRICS | TERMS | MODEL


def test_the_table_has_every_key_of_a_run(keys, tmp_path):
    (tmp_path / "texts").mkdir()
    for index in range(12):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"number {index} " * 40)
    sections = {
        "model": {"embed": 16, "layers": 2, "heads": 2, "mlp": 32},
        "data": {"sources": [str(tmp_path / "texts")], "sequence": 32, "global_batch": 8, "validation_fraction": 0.3,
                 "cache_dir": str(tmp_path / "cache"), "workers": 1},
        "log": {"tensorboard": False, "peak_tflops": 1.0}, "eval": {"every": 2},
    }  # fmt: skip
    run = jaxtrain.train(sections, steps=4, dir=str(tmp_path), name="run").run_dir
    written = {key for line in (run / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert {"eval/loss", "mfu", "step_time"} <= written
    assert {key for key in written if not key.startswith("eval/")} <= keys
