"""Data of two processes: each kind resumed, local rows, an end or an error on one of them, batches that differ."""

from __future__ import annotations

import io
import json
from pathlib import Path

import data_runs
import numpy as np
import pytest
from rich.console import Console

import jaxtrain
from jaxtrain.trackers.console import ConsoleTracker

KINDS = ("by step", "arrays", "function", "generator", "with state", "grain", "datasets", "torch loader")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of the runs of two processes."""
    folder = tmp_path_factory.mktemp("data")
    kinds = [kind for kind in KINDS if not data_runs.missing(kind)]
    done = data_runs.launch("data_processes.py", folder, json.dumps(kinds))
    assert [code for code, _ in done] == [0, 0], "\n".join(output[-3000:] for _, output in done)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict]:
    """What each of the two processes saw."""
    return [json.loads((folder / f"results-{index}.json").read_text()) for index in range(2)]


def whole(count: int = data_runs.STEPS) -> list[float]:
    return data_runs.plain_losses(list(data_runs.batches(count)))


pytestmark = pytest.mark.xdist_group("data_processes")  # one pair of processes for all


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_resumed_where_it_was(results, tmp_path: Path, kind: str):
    if package := data_runs.missing(kind):
        pytest.skip(f"needs {package}")
    make, _, said = data_runs.KINDS[kind]
    one = data_runs.losses(data_runs.trainer(tmp_path, "one", make()).fit().run_dir)
    name = kind.replace(" ", "-")
    np.testing.assert_allclose(results[0][name]["losses"], one, rtol=1e-5)
    assert results[0][name]["data"] == ([said] if said else [])
    assert results[1][name]["step"] == data_runs.STEPS


@pytest.mark.parametrize(
    ("name", "steps", "process"), [("ends", 6, 1), ("ends-at-once", 2, 1), ("ends-both", 8, 1), ("local-ends", 7, 0)]
)
def test_the_end_on_one_process_ends_both_after_the_same_step(results, name: str, steps: int, process: int):
    for seen in results:
        assert seen[name]["stopped_by"] == f"data: it ends after {steps} batches (process {process})"
        assert seen[name]["step"] == steps
        assert seen[name]["saved"] == [steps]
    np.testing.assert_allclose(results[0][name]["losses"], whole(steps), rtol=1e-5)


def test_data_of_just_enough_batches_does_not_end_early(results):
    assert [seen["exact"]["stopped_by"] for seen in results] == [None, None]
    np.testing.assert_allclose(results[0]["exact"]["losses"], whole(), rtol=1e-5)


def test_an_error_on_one_process_is_that_of_both_and_the_state_is_saved(results):
    said = "data: batch 6 cannot be read: KeyError: 'missing' (data_processes.py:"
    for seen in results:
        assert seen["raises"]["error"].startswith(said)
        assert seen["raises"]["error"].endswith("(process 1)")
        assert 6 in seen["raises"]["saved"]
        assert seen["raises"]["step"] == data_runs.STEPS  # resumed from there
        assert seen["by-step-raises"]["error"].startswith("data: batch 7 cannot be made: ZeroDivisionError: division")
        assert seen["by-step-raises"]["saved"] == [7]
        assert "batch 0 cannot be read: KeyError" in seen["raises-first"]["error"]
        assert all("\n" not in case.get("error", "") for case in seen.values())
    np.testing.assert_allclose(results[0]["raises"]["losses"], whole(), rtol=1e-5)


def test_batches_that_differ_end_the_run(results):
    for seen in results:
        assert seen["differs-first"]["error"].startswith("data: its first batch differs between processes 0 and 1; exp")
        assert seen["differs"]["error"].startswith("data: batch 3 differs between processes 0 and 1; expected the same")
        assert seen["differs"]["saved"][0] < data_runs.STEPS


def test_local_rows_are_those_of_the_shard(results):
    assert [seen["local"]["shard"] for seen in results] == [[0, 2], [1, 2]]
    assert results[0]["local"]["data"] == [data_runs.READ]
    np.testing.assert_allclose(results[0]["local"]["losses"], whole(), rtol=1e-5)
    assert [seen["tensor"]["shard"] for seen in results] == [[0, 1], [0, 1]]
    np.testing.assert_allclose(results[0]["tensor"]["losses"], whole(), rtol=1e-5)
    assert results[0]["local-state"]["data"] == [data_runs.SAVED]
    np.testing.assert_allclose(results[0]["local-state"]["losses"], whole(), rtol=1e-5)
    assert results[0]["local-arrays"]["error"].startswith("data: dict is asked for the rows of each process, so it can")


def test_a_state_of_two_processes_serves_one_if_it_is_of_global_batches(results, folder: Path):
    console = ConsoleTracker(1, console=Console(file=io.StringIO(), width=200))
    data, more = data_runs.Counting(), {"resume": True, "steps": 13}
    run = data_runs.trainer(folder, "x", data, console=console, run_dir=folder / "with-state", **more)
    assert run.fit().step == 13
    assert data_runs.SAVED in console.console.file.getvalue()
    assert data.read <= 1 + 2  # the first one, whose shapes are needed, and those of the steps
    np.testing.assert_allclose(data_runs.losses(run.run_dir), whole(13), rtol=1e-5)
    said = "data: 2 shards had local rows, and 1 have them now; expected a layout and processes with 2, or glob"
    with pytest.raises(jaxtrain.UserError, match=said):
        data_runs.trainer(folder, "x", data, run_dir=folder / "local", rows="local", **more).fit()
    with pytest.raises(jaxtrain.UserError, match="had local rows, and have global ones now; expected rows="):
        data_runs.trainer(folder, "x", data, run_dir=folder / "local", **more).fit()


def test_validation_data_that_ends_on_one_process_ends_on_both(results):
    assert results[0]["eval"]["step"] == data_runs.STEPS
    assert results[0]["eval"]["eval"] == results[1]["eval"]["eval"] > 0
