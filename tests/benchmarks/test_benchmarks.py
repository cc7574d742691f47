"""Every benchmark runs at its smallest and writes JSON that names the machine; figures are not looked at."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_modules import BENCHMARKS, load_benchmark

from jaxtrain.core.layout_check import check_layout
from jaxtrain.core.resolve import resolve
from jaxtrain.planning import pods
from jaxtrain.planning.hardware import targets


def quick(tmp_path, name: str, *options: str) -> dict:
    """The record that a benchmark writes."""
    out = tmp_path / f"{name}.json"
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_COMPILATION_CACHE_DIR": ""}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert record["benchmark"] == name
    assert record["machine"]["processor"]
    assert record["machine"]["jax"]
    return record | {"printed": done.stdout}


def test_overhead_trains_the_same_model(tmp_path):
    (result,) = quick(tmp_path, "overhead")["results"]
    assert result["steps_compared"] >= 9
    assert result["loss_difference"]["largest"] < 1e-5
    assert result["losses"]["last"] < result["losses"]["first"]
    assert result["wall_ratio"]["median"] > 0


def test_overhead_refuses_another_model(tmp_path):
    overhead = load_benchmark("overhead")

    screen = SimpleNamespace(losses=[6.0, 5.9, 5.8], bare=SimpleNamespace(losses=[6.0, 5.9, 5.7]), times=[])
    with pytest.raises(SystemExit, match="not the same model"):
        overhead.summary({"precision": "fp32", "block": 1}, screen, {})


@pytest.mark.sampled(4, among="file")
def test_compile(tmp_path):
    (result,) = quick(tmp_path, "compile")["results"]
    phases = result["empty"]["phases"]
    assert {"imports", "build", "init", "trace", "lower", "compile", "step"} == phases.keys()
    assert sum(phases.values()) == pytest.approx(result["empty"]["first_step"], rel=0.01)
    assert not result["empty"]["from_cache"]
    assert result["full"]["from_cache"]


@pytest.mark.sampled(4, among="file")
def test_gpu_mfu_says_where_time_goes(tmp_path):
    (result,) = quick(tmp_path, "gpu_mfu")["results"]
    shares = result["breakdown"]["shares"]
    assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
    assert min(shares[kind] for kind in ("attention", "matmul", "loss", "optimizer")) > 0
    assert result["breakdown"]["without_scope"] < 0.2
    assert result["flops_per_token"]["attended"] < result["flops_per_token"]["mfu"]
    assert abs(result["loss"] - np.log(32000)) < 3


@pytest.mark.parametrize(("name", "options"), [("wire", []), ("gpu_mfu", ["--target", "h100"])])
def test_targets_without_their_compiler(tmp_path, monkeypatch, capsys, name: str, options: list[str]):
    out = tmp_path / "skipped.json"
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--out", str(out), *options])
    monkeypatch.setattr(targets, "installed_version", lambda package: "")
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    record = json.loads(out.read_text())
    message = record["skipped"] if "skipped" in record else record["results"]["skipped"]
    assert message.endswith("pip install 'jaxtrain[plan-gpu]'")
    assert message in capsys.readouterr().out


def test_gpu_mfu_without_a_gpu(tmp_path):
    out = tmp_path / "mfu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_mfu.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    record = json.loads(out.read_text())
    if "skipped" not in record:
        pytest.skip("this machine has a GPU")
    assert done.stdout.splitlines() == [record["skipped"]]


def test_peer_torch(tmp_path):
    record = quick(tmp_path, "peer_torch")
    if "skipped" in record:
        assert record["printed"].splitlines() == [record["skipped"]]
        return
    (result,) = record["results"]
    assert result["first_losses_differ"] < 1e-4
    assert result["memory"]["torch"]["peak"] > 0


@pytest.mark.sampled(4, among="file")
@pytest.mark.parametrize("name", ["attention", "cross_entropy", "checkpoint", "data", "quickstart"])
def test_package_benchmarks(tmp_path, name):
    assert quick(tmp_path, name, *(["--measure"] if name == "cross_entropy" else []))["results"]


@pytest.mark.sampled(4, among="file")
def test_plain_model_trains_the_decoder(tmp_path):
    results = quick(tmp_path, "plain_model")["results"]
    for row in results["time"]:
        assert row["loss difference"] < 1e-5
        assert row["ratio"]["median"] > 0
    if "skipped" not in results["memory"]:
        (row,) = results["memory"]
        assert row["ratio"] == pytest.approx(1, abs=0.05)
        assert row["sent ratio"] == pytest.approx(1, abs=0.05)


@pytest.mark.sampled(4, among="file")
def test_memory_is_that_of_the_formulas(tmp_path):
    results = quick(tmp_path, "memory")["results"]
    for row in results["formula"]:
        assert abs(row["ratio"] - 1) < 0.02
        if row["devices"] > 1:
            gathers = row["stage"] == 2 or (row["stage"] == 1 and row["microbatches"] > 1)
            # Stages 0 and 3 keep no copy in the compute dtype, and with one microbatch no float32 gradients; stage 1
            # with one is stage 2.
            is_own = row["stage"] == 1 or row["microbatches"] == 1
            want = row["paper 4 GB"] if gathers else row["here GB" if is_own else "paper GB"]
            assert row["held GB"] == pytest.approx(want, rel=0.02)
    (first, second) = results["compiled"]
    assert second["total MB"] < 0.75 * first["total MB"]  # gradients in shards
    for row in results["compiled"]:
        assert 0 < row["more MB"] < 0.8 * row["held MB"]  # activations; not one more tree of gradients


@pytest.mark.sampled(4, among="file")
def test_pipeline_runs_every_matmul_once(tmp_path):
    results = quick(tmp_path, "pipeline")["results"]
    names = ["1f1b", "zb_h1", "autodiff"]
    assert [row["schedule"] for row in results["waiting"]] == [row["schedule"] for row in results["flops"]] == names
    for row in results["flops"]:
        # 2 FLOPs of 3 passes: 8 layers of 4 x 32 x 32 and 3 x 32 x 64 weights, head, scores and values of 32 tokens.
        weights, attended = 8 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 64, 8 * 2 * 32 * 32
        assert row["GFLOP"] == pytest.approx(6 * (weights + attended) * 8 * 32 / 1e9)  # 4 microbatches, 2 rows of 32
        assert abs(row["beyond the bubble"]) < 0.05
    assert [row["ratio"] for row in results["flops"]] == pytest.approx([1, 1, 5 / 4], rel=0.02)
    (compiled,) = results["memory"]
    assert compiled["error"] == ""
    assert compiled["m=4"] > 0


@pytest.mark.sampled(4, among="file")
def test_plan_accuracy_measures_what_it_predicts(tmp_path):
    results = quick(tmp_path, "plan_accuracy", "--parts", "simulated", "gpu")["results"]
    simulated = results["simulated"]
    assert min(simulated["rates"].values()) > 0
    for row in simulated["rows"]:
        assert row["live MB"] == pytest.approx(row["state MB"], rel=0.001)
        assert 0.2 < row["predicted s"] / row["processor s"] < 5
    assert set(simulated["agreement"]) == {"wall s", "processor s"}
    assert "skipped" in results["gpu"] or results["gpu"]["rows"]


@pytest.mark.sampled(4, among="file")
def test_chaos_ends_as_if_nothing_had_happened(tmp_path):
    results = quick(tmp_path, "chaos")["results"]
    assert results["deaths"] >= 3
    assert results["wrong"] == 0
    assert results["recovery"]["median"] > 0


@pytest.mark.chaos
def test_chaos_of_several_processes_ends_as_if_nothing_had_happened(tmp_path):
    results = quick(tmp_path, "chaos_processes")["results"]
    assert results["deaths"] >= 2
    assert results["wrong"] == 0
    assert results["recovery"]["median"] > 0


@pytest.mark.sampled(4, among="file")
def test_scale(tmp_path):
    results = quick(tmp_path, "scale", "--parts", "saves", "tensors")["results"]
    assert [row["folders listed"] for row in results["saves"]["rows"]] == [1, 1]
    assert [row["tensors"] for row in results["tensors"]["rows"]] == [10, 20]


@pytest.mark.sampled(4, among="file")
def test_soak(tmp_path):
    results = quick(tmp_path, "soak")["results"]
    assert results["wrong"] == []
    assert results["many processes"][0]["to step"] >= 60


@pytest.mark.sampled(4, among="file")
def test_control_plane_forms_generations(tmp_path):
    (row,) = quick(tmp_path, "control_plane")["results"]
    assert row["agents"] == 10
    assert 1.0 < row["silent"] < 4.0  # the heartbeat is 2 s
    assert row["cpu/beat"] < 20_000


@pytest.mark.sampled(4, among="file")
def test_peers_come_back(tmp_path):
    (row,) = quick(tmp_path, "peers")["results"]
    assert row["MiB"] == 4
    assert min(row[name] for name in ("stall", "copy", "restore", "disk")) > 0


@pytest.mark.sampled(4, among="file")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_islands_transport_moves_the_same_values(tmp_path):
    rows = quick(tmp_path, "islands_transport")["results"]
    ways = ["ray", "ray_copied", "transfer"]
    assert [(row["processes"], row["way"]) for row in rows] == [(k, way) for k in ("plain", "actors") for way in ways]
    assert all(0 < row["fastest"] <= row["seconds"]["median"] for row in rows)
    assert not any(row["aliased"] for row in rows if row["way"] != "ray")


def test_rank_agreement():
    accuracy = load_benchmark("plan_accuracy")
    assert accuracy.tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert accuracy.tau([1, 2, 3, 4], [40, 30, 20, 10]) == -1
    assert accuracy.tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
    assert accuracy.regret([1, 2, 3], [12, 10, 11]) == pytest.approx(0.2)


def test_published_runs_are_configs_that_load():
    published = load_benchmark("published")
    runs = (*published.GPUS, *published.TPUS)
    assert len({(run.name, run.target) for run in runs}) == len(runs) >= 8
    for run in runs:
        config, _ = resolve(str(BENCHMARKS.parent / run.keys[0]), *run.keys[1:], paths=False)
        target = targets.parse(run.target)
        sizes = (size for axis, size in config.mesh.model_dump().items() if axis != "dcn")
        assert prod(sizes) == target.devices
        assert run.source
        assert run.known in ("fitted", "test")


def test_worked_examples_are_configs_that_load():
    for target, file, *keys in load_benchmark("plan_examples").EXAMPLES.values():
        devices = targets.parse(target).devices
        checks = [lambda config, n=devices: check_layout(config, n)]
        resolve(str(BENCHMARKS.parent / "configs" / file), *keys, paths=False, checks=checks)


def test_clusters_planned_from_pods_are_configs_that_have_some():
    for name, (largest, target, file, *keys) in load_benchmark("plan_pods").CASES.items():
        devices = targets.parse(target).devices
        config, _ = resolve(
            str(BENCHMARKS.parent / "configs" / file), *keys, paths=False,
            checks=[lambda config, n=devices: check_layout(config, n)],
        )  # fmt: skip
        found = pods.smaller_pods(config, targets.parse(target), largest)
        assert found, name
        for pod in found:
            assert check_layout(pod.config, pod.target.devices) == []


def test_packed_batch_equals_the_data_package():
    batch = load_benchmark("common").packed_batch(0, 3, 32, 100, 4)
    for row in range(3):
        segments, positions = batch["segments"][row], batch["positions"][row]
        assert list(np.unique(segments)) == [1, 2, 3, 4]
        begins = np.flatnonzero(np.diff(segments, prepend=0))
        np.testing.assert_array_equal(np.flatnonzero(positions == 0), begins)
        np.testing.assert_array_equal(np.diff(positions)[np.diff(segments) == 0], 1)
        inside = np.flatnonzero(batch["weights"][row][:-1])
        np.testing.assert_array_equal(batch["targets"][row][inside], batch["tokens"][row][inside + 1])
        np.testing.assert_array_equal(np.flatnonzero(batch["weights"][row] == 0), begins[1:] - 1)


def test_planted_bugs_are_in_the_parsers():
    """Each text to be replaced is in its module exactly once, and each function to be measured exists."""
    parsers = load_benchmark("parser_coverage")
    for name, target in parsers.TARGETS.items():
        path = BENCHMARKS.parent / target.module
        assert parsers.function_lines(path, target.functions), name
        assert len(target.bugs) >= 3, name
        for text, other in target.bugs:
            assert path.read_text().count(text) == 1, (name, text)
            assert text != other
        assert all((BENCHMARKS.parent / unit).exists() for unit in target.units), name


@pytest.mark.sampled(4, among="file")
def test_callbacks_counts_processor_time(tmp_path):
    (result,) = quick(tmp_path, "callbacks")["results"]
    assert 0 < result["without_ms"]["median"] < 1000
    assert result["added_ms_95"]["low"] <= result["added_ms"]["median"] <= result["added_ms_95"]["high"]


@pytest.mark.sampled(4, among="file")
def test_sync_compares_ways_to_agree(tmp_path):
    record = quick(tmp_path, "sync")
    bsp, diloco = record["results"]["table"]["quick"]
    assert bsp["way"] == "bsp"
    assert bsp["fewer"] == 1
    assert diloco["fewer"] > 16
    assert diloco["wall slow"] < bsp["wall slow"]
    assert bsp["loss"] < record["results"]["runs"][0]["unigram_entropy"]
    sync, figure = load_benchmark("sync"), load_benchmark("sync_figure")
    runs = {run["way"]: run for run in record["results"]["runs"]}
    for title in figure.AXES:
        lines = figure.panel(0, title, runs, False, 4.0)
        assert sum("<polyline" in line for line in lines) == 2
    assert sync.next_run(record["results"]["runs"], "bsp", "quick") == pytest.approx(runs["bsp"]["lr"] / 2)
