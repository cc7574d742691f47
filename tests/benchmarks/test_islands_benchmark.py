"""Figures and tables of benchmarks/islands.py against sums by hand, and its configs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import pytest
from benchmark_modules import BENCHMARKS, load_benchmark

from jaxtrain.config.sections.island_config import program_config
from jaxtrain.core.program import build_program
from jaxtrain.core.resolve import resolve
from jaxtrain.planning import islands, step_program
from jaxtrain.planning.result import Plan
from jaxtrain.planning.target_config import decoder_vocabulary

RESULTS = json.loads((BENCHMARKS / "results" / "cpu-islands.json").read_text())["results"]


@pytest.fixture
def plans() -> ModuleType:
    """Runs and their configs."""
    return load_benchmark("islands_runs")


@pytest.fixture
def bench(plans: ModuleType) -> ModuleType:
    """Figures and tables."""
    return load_benchmark("islands_figures")


def sample(time: float, sent: int, waited: float) -> dict[str, Any]:
    """A sample of two islands, both alike."""
    head = {"coordinator": time, "servers": 2 * time, "ray": 3 * time}
    return {"time": time, "links": [(sent, 2 * sent)] * 2, "head": head, "waited": {0: waited, 1: waited}}


def seen(bench: ModuleType) -> Any:
    """Island 0 does a step at 10, 12, .. 18, and is validated for a second at 14; island 1 a second later each."""
    steps = [{n: 8.0 + 2 * n + late for n in range(1, 6)} for late in (0.0, 1.0)]
    validations = [
        [
            {"time": 15.0, "step": 3, "loss": 3.0, "seconds": 1.0},
            {"time": 19.0, "step": 5, "loss": 2.0, "seconds": 1.0},
        ],
        [],
    ]
    samples = [sample(0.0, 0, 0.0), sample(11.0, 100, 1.0), sample(18.0, 800, 4.5), sample(30.0, 900, 9.0)]
    exchanged = [dict.fromkeys(own, 80.0) for own in steps]
    pushed = [(at - 0.5, 80) for own in steps for at in own.values()]
    return bench.Seen(steps, validations, samples, exchanged, pushed, {"join": 2})


def test_figures_are_of_the_time_in_which_all_train(bench):
    run = bench.Run("links", "bsp", 5, 2, mbit=8.0)
    found = run.key | bench.figures(run, seen(bench))
    assert found["seconds"] == 6.0  # 11 to 18, without a second of validation
    assert found["steps_done"] == [4, 3]
    assert found["tokens_per_second"] == pytest.approx(7 * bench.ROWS * bench.SEQUENCE / 6)
    assert found["waited"] == [0.5, 0.5]
    assert (found["sent_bytes"], found["received_bytes"]) == (1400, 2800)
    assert found["exchanged_bytes"] == 7 * 80
    assert found["pushed_bytes"] == 7 * 80
    assert found["head_seconds"] == {"coordinator": 7, "servers": 14, "ray": 21}
    (row,) = bench.link_rows([found], [])
    assert row["link busy"] == pytest.approx(2100 / 1e6 / 7)
    (row,) = bench.scale_rows([found])
    assert row["servers cpu s/GB"] == pytest.approx(14 / (560 / 1e9))


@pytest.mark.parametrize(("way", "seconds"), [("bsp", 1.0), ("diloco", 1 / 16)])
def test_planned_tokens_are_those_of_the_step_without_a_limit_and_the_links(bench, way, seconds):
    """A second in which an island pushes a MB and reads one at 16 Mbit/s, as all do at once; `figures` are not read."""
    free = bench.Run("scale", way, 96, 2).key | {"tokens_per_second": 2 * 128 / 0.25, "push_bytes": 1_000_000}
    run = bench.Run("links", way, 96, 2, mbit=16.0).key
    assert bench.planned_tokens(run, free) == pytest.approx(2 * 128 / (0.25 + seconds))
    assert bench.planned_tokens(free, free) is None
    both_share_the_head = {**run, "head_mbit": 16.0}
    assert bench.planned_tokens(both_share_the_head, free) == pytest.approx(2 * 128 / (0.25 + 2 * seconds))
    assert bench.planned_tokens(run, None) is None


def test_the_committed_tables_are_those_of_the_committed_runs(bench):
    """So what is planned there is what the plan's function gives now."""
    assert json.loads(json.dumps(bench.tables(RESULTS["runs"]))) == RESULTS["tables"]


def test_what_is_planned_is_near_what_was_measured():
    rows = [row for row in RESULTS["tables"]["links"] if row["Mbit/s"] is not None]
    assert [(row["way"], row["Mbit/s"]) for row in rows] == [
        (way, mbit) for way in ("bsp", "diloco") for mbit in (50, 200, 800)
    ]
    assert all(abs(row["planned tokens/s"] / row["tokens/s"] - 1) < 0.2 for row in rows)


@pytest.mark.parametrize("way", ["bsp", "diloco"])
def test_a_plan_of_the_config_has_the_tokens_of_the_table(plans, tmp_path, way):
    """`jaxtrain plan` with the links as options gives the same as the column, from the program's own bytes."""
    (row,) = (row for row in RESULTS["tables"]["links"] if (row["way"], row["Mbit/s"]) == (way, 200))
    (free,) = (row for row in RESULTS["tables"]["links"] if (row["way"], row["Mbit/s"]) == (way, None))
    (run,) = (run for run in plans.runs_of("links", 200.0, False) if (run.way, run.mbit) == (way, 200))
    config, _ = resolve(str(plans.config_of(run, tmp_path)))
    program = build_program(program_config(config), decoder_vocabulary(config), jax.devices()[:1])
    tokens = plans.ROWS * plans.SEQUENCE
    plan = Plan(
        "local", "cpu", 1, "ddp", dict(program.layout.sizes), fits=True, tokens=tokens,
        step_seconds=4 * tokens / free["tokens/s"], exposed_seconds=0.0, tree_bytes=step_program.tree_bytes(program),
    )  # fmt: skip
    found = islands.with_islands(config, plan, "200Mbit", "1000Tbit").islands
    assert found is not None
    assert found.own.tokens_per_second == pytest.approx(row["planned tokens/s"], rel=1e-6)


def test_curves_leave_validations_out(bench):
    assert bench.curve(seen(bench)) == [(3.0, 3, 3.0), (6.0, 5, 2.0)]


@pytest.mark.parametrize(("loss", "seconds"), [(3.0, 3.0), (2.5, 4.5), (2.0, 6.0), (1.9, None), (4.0, 3.0)])
def test_time_to_a_loss_is_between_validations(bench, loss, seconds):
    assert bench.time_to([(3.0, 3, 3.0), (6.0, 5, 2.0)], loss) == seconds


def test_tables_compare_what_all_reach(bench):
    run = bench.Run("loss", "bsp", 5, 2)
    first = run.key | bench.figures(run, seen(bench))
    other = {**first, "way": "asp", "curve": [(1.0, 3, 2.6), (2.0, 5, 2.4)]}
    rows = bench.tables([first, other])["loss"]
    assert [row["to loss"] for row in rows] == [2.4, 2.4]
    assert [row["seconds"] for row in rows] == pytest.approx([4.8, 2.0])


def test_slow_island_is_compared_with_even_ones(bench):
    run = bench.Run("slow", "bsp", 5, 2, pace=(0.2, 0.2))
    even = run.key | bench.figures(run, seen(bench))
    uneven = replace(run, pace=(0.2, 0.6)).key | {k: v for k, v in even.items() if k != "pace"}
    uneven["curve"] = [(2 * seconds, step, loss) for seconds, step, loss in even["curve"]]
    uneven = {**uneven, "pace": [0.2, 0.6], "tokens_per_second": even["tokens_per_second"] / 4}
    (row,) = bench.tables([even, uneven])["slow"]
    assert row["left"] == 0.25
    assert row["step s of slow"] == 2.0
    assert (row["to loss"], row["seconds"], row["seconds with slow"], row["times"]) == (2.0, 6.0, 12.0, 2.0)


def test_lossy_runs_are_beside_those_without_losses(bench):
    """At 2.4, which the other reaches: 4.8 s with losses, 2 s without."""
    lossy = bench.Run("lossy", "bsp", 5, 2, lost=0.01).key | bench.figures(bench.Run("lossy", "bsp", 5, 2), seen(bench))
    assert (lossy["final"], lossy["events"]) == ([2.0, None], {"join": 2})
    plain = {**lossy, "lost": 0.0, "curve": [(1.0, 3, 2.6), (2.0, 5, 2.4)]}
    (row,) = bench.tables([lossy, plain])["lossy"]
    assert (row["to loss"], row["undisturbed"], row["final"], row["final undisturbed"]) == (2.4, 2.0, 2.0, 2.4)
    assert (row["seconds"], row["times"]) == pytest.approx((4.8, 2.4))
    assert (row["join"], row["leave"]) == (2, 0)
    (row,) = bench.tables([lossy])["lossy"]
    assert (row["seconds"], row["undisturbed"], row["times"]) == (6.0, None, None)
    cut = {**lossy, "part": "cut", "lost": 0.0, "cut": 30.0}
    (row,) = bench.tables([cut, {**plain, "part": "loss"}])["cut"]
    assert (row["undisturbed"], row["final"]) == (2.0, 2.0)
    worse = {**plain, "way": "asp", "part": "loss", "curve": [(1.0, 3, 3.1), (2.0, 5, 3.0)]}
    rows = bench.tables([cut, {**worse, "part": "cut", "cut": 30.0}, {**plain, "part": "loss"}, worse])["cut"]
    assert [(row["to loss"], row["lowest"]) for row in rows] == [(3.0, 2.4), (3.0, 3.0)]
    assert (rows[0]["times"], rows[0]["lowest times"]) == pytest.approx((3.0, 2.4))


def test_pushes_in_few_bits_count_as_they_are_and_in_float32(bench):
    exact = bench.Run("scale", "bsp", 5, 2).key | bench.figures(bench.Run("scale", "bsp", 5, 2), seen(bench))
    rounded = {**exact, "way": "bsp int8", "push_bytes": 20, "pushed_bytes": 7 * 20}
    rows = bench.tables([exact, rounded])["scale"]
    assert [row["servers cpu s/GB"] for row in rows] == pytest.approx([14 / 560e-9, 14 / 140e-9])
    assert [row["head cpu s/float32 GB"] for row in rows] == pytest.approx([42 / 560e-9] * 2)
    (row,) = bench.tables([rounded])["scale"]
    assert row["head cpu s/float32 GB"] is None


def test_runs_that_failed_are_in_a_table_of_their_own(bench):
    failed = bench.Run("loss", "gossip", 960).key | {"error": "not yet\nwhy"}
    assert bench.tables([failed]) == {
        "failed": [{"part": "loss", "way": "gossip", "size": "1M", "islands": 4, "error": "not yet"}]
    }


def test_a_run_is_found_among_older_ones(plans):
    """The fields that it lacks have their defaults."""
    islands, (run, *_) = load_benchmark("islands", "islands_benchmark"), plans.runs_of("links", 200.0, False)
    known = dict(next(record for record in RESULTS["runs"] if record["part"] == "links"))
    del known["lost"]
    assert islands.is_same(run, known)
    assert not islands.is_same(replace(run, lost=0.01), known)


@pytest.mark.parametrize("quick", [False, True])
def test_runs_are_configs_that_load(plans, tmp_path, quick):
    """Ways that islands may not have yet are configs of replicas of one program."""
    runs = [run for part in plans.PARTS for run in plans.runs_of(part, 200.0, quick)]
    assert len({str(run.key) for run in runs}) == len(runs)
    assert {run.part for run in runs} == set(plans.PARTS) - ({"links", "slow", "long_cut"} if quick else set())
    for run in runs:
        settings = plans.settings_of(run, tmp_path)
        if run.way in ("streaming", "gossip"):
            settings |= {"islands": {}, "mesh": {"replica": run.islands}}
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(settings))
        config, _ = resolve(str(file))
        assert config.islands.count == (0 if run.way in ("streaming", "gossip") else run.islands)
        assert config.sync.strategy == plans.WAYS[run.way]["sync"]["strategy"]
        assert config.data.global_batch % run.islands == 0
        assert run.steps % run.every == 0
