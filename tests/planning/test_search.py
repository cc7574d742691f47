"""Layout search: what it compiles, in what order and for how long, what it caches, reports and writes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from test_choices import VOCAB, tiny

from jaxtrain import load
from jaxtrain.config.schema import Config
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import UserError
from jaxtrain.planning.choices import LayoutChoice, SearchSpace
from jaxtrain.planning.compile import CompileTimeout
from jaxtrain.planning.cost.estimate import CostModel, Estimate
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.report.values import format_seconds
from jaxtrain.planning.result import Plan
from jaxtrain.planning.search import search as module
from jaxtrain.planning.search.candidates import CandidateSet
from jaxtrain.planning.search.families import why_estimate_is_worse
from jaxtrain.planning.search.plan_cache import PlanCache
from jaxtrain.planning.search.ranking import (
    OBJECTIVES,
    Objective,
    families_table,
    layout_text,
    ranking_table,
    write_layout,
)
from jaxtrain.planning.search.search import SearchResult, resize, search, smaller_targets
from jaxtrain.sharding.axes import AXES

H100 = "h100:2x4"
SMALL = tiny("precision=bf16", "data.sequence=512")


class Compiler:
    """Fake compiler: plans are the estimates with errors up to 5%. Records its calls."""

    def __init__(self, target: str = H100, needs: float = 1.0) -> None:
        where = targets.parse(target)
        self.space = SearchSpace(SMALL, where.devices or 1, VOCAB)
        self.cost_model, self.needs = CostModel(self.space, where), needs
        self.truth = {self.key(self.space.to_config(one)): one for one in self.space}
        self.asked: list[str] = []
        self.lock = threading.Lock()

    @staticmethod
    def key(config: Config) -> str:
        return json.dumps(config.model_dump(mode="json"))

    def seconds(self, config: Config) -> float | None:
        exact = self.cost_model.estimate(self.truth[self.key(config)])
        if exact is None or not exact.fits():
            return None
        noise = int(hashlib.sha256(self.key(config).encode()).hexdigest()[:8], 16) / 2**32
        return exact.step_seconds * (0.95 + 0.1 * noise)

    def __call__(self, config: Config, vocab: int | None, target: str, *, timeout: float) -> Plan:
        with self.lock:
            self.asked.append(self.key(config))
        exact = self.cost_model.estimate(self.truth[self.key(config)])
        assert exact is not None
        sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
        needs, usable = round(exact.needs * self.needs), round(exact.usable or 0)
        return Plan(
            target, "chip", 8, "search", sizes, fits=needs <= usable, needs=needs, usable=usable,
            reason="" if needs <= usable else "too large", memory={"activations": needs},
            step_seconds=self.seconds(config), compute_seconds=1.0, bottleneck="made up", mfu=0.4,
        )  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


def run(compiler, folder: Path, **options) -> SearchResult:
    return search(SMALL, VOCAB, H100, **{"predict": compiler, "cache": folder, "budget": 60.0, "top": 6, **options})


@pytest.fixture(scope="module")
def found(compiler: Compiler, tmp_path_factory) -> SearchResult:
    return run(compiler, tmp_path_factory.mktemp("plans"))


def test_the_true_winner_is_found(compiler: Compiler, found: SearchResult):
    exact = [compiler.seconds(compiler.space.to_config(one)) for one in compiler.space
             if one.size("pipeline") == 1 and one.context_parallel != "gather"]  # fmt: skip
    assert found.winner is not None
    assert found.winner.step_seconds is not None
    # The formulas are wrong by 5% at most, so what they think best is no worse than this.
    assert found.winner.step_seconds <= 1.05 / 0.95 * min(one for one in exact if one is not None)


def test_compiled_layouts_are_ranked_by_their_step_time(found: SearchResult):
    compiled = [one for one in found.ranking if one.plan is not None]
    assert len(compiled) == 6
    seconds = [one.step_seconds for one in compiled]
    assert seconds == sorted(seconds)
    assert found.ranking[: len(compiled)] == tuple(compiled)
    assert compiled[0].reason == "made up"
    assert all("slower" in one.reason or "as fast" in one.reason for one in compiled[1:])
    assert len({one.estimate.choice.sizes for one in compiled}) >= 3  # of different kinds


def test_plans_of_smaller_pods_are_marked(found: SearchResult):
    first, *others = found.ranking
    assert first.plan is not None
    told = dataclasses.replace(first, plan=dataclasses.replace(first.plan, pods=("h100:4096x8 (data 2 instead of 8)",)))
    marked = dataclasses.replace(found, ranking=(told, *others))
    console = Console(width=160)
    with console.capture() as capture:
        console.print(ranking_table(marked))
    assert capture.get().count("compiled, as a pod") == 1
    line = "# Predicted (extrapolated from a smaller pod: h100:4096x8 (data 2 instead of 8)): "
    assert line in layout_text(marked, told)
    assert "# Predicted (compiled): " in layout_text(found, first)


def test_a_second_search_compiles_nothing(tmp_path: Path, compiler: Compiler):
    run(compiler, tmp_path)
    before = len(compiler.asked)
    again = run(compiler, tmp_path)
    assert len(compiler.asked) == before
    assert [one.source for one in again.ranking if one.plan] == ["cached"] * 6
    assert "6 of them in an earlier search" in again.summary()
    run(compiler, tmp_path, top=7)
    assert len(compiler.asked) == before + 1


def test_a_broken_cache_file_is_replaced_and_no_other_file_remains(tmp_path: Path, compiler: Compiler):
    run(compiler, tmp_path, top=2)
    first, *_ = sorted(tmp_path.iterdir())
    first.write_text(first.read_text()[:50])
    before = len(compiler.asked)
    run(compiler, tmp_path, top=2)
    assert len(compiler.asked) == before + 1
    assert all(Plan.from_dict(json.loads(file.read_text())).fits for file in tmp_path.iterdir())


def test_ctrl_c_keeps_compiled_plans(tmp_path: Path, compiler: Compiler):
    def interrupt(stage: str, done: int, of: int, what: str) -> None:
        if stage == "compile" and done == 2:
            raise KeyboardInterrupt

    stopped = run(compiler, tmp_path, progress=interrupt, jobs=1)
    assert stopped.stopped == "interrupted"
    assert stopped.winner is not None
    assert len([one for one in stopped.ranking if one.plan]) == 2
    before = len(compiler.asked)
    run(compiler, tmp_path, jobs=1)
    assert len(compiler.asked) == before + 4


@pytest.mark.measures
def test_the_time_budget_ends_a_search(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "MIN_SECONDS", 0.2)

    def slow(config: Config, vocab: int | None, target: str, *, timeout: float) -> Plan:
        time.sleep(timeout)
        raise CompileTimeout(f"target {target}: not compiled after {timeout:.0f} s")

    start = time.monotonic()
    late = run(slow, tmp_path, budget=6.0)  # the formulas, also on a busy machine, take less
    assert time.monotonic() - start < 12
    assert late.stopped == "the time was up"
    assert {one.source for one in late.ranking} == {"estimate"}
    # What was begun comes first, as good as it was before, and says why there is no plan of it.
    assert len(late.ranking) > 2
    assert all(one.fits and one.reason.startswith("not compiled: the time was up") for one in late.ranking[:2])
    assert not any("time was up" in one.reason for one in late.ranking[2:])
    assert len(late.not_compiled) == len(late.ranking)
    assert "more layouts were to be compiled" in late.summary()
    assert not list(tmp_path.iterdir())


def test_a_layout_that_does_not_compile_does_not_end_the_search(tmp_path: Path, compiler: Compiler):
    def broken(config: Config, vocab: int | None, target: str, *, timeout: float) -> Plan:
        if config.mesh.fsdp == 8:
            raise UserError("mesh: breaks\nmore")
        return compiler(config, vocab, target, timeout=timeout)

    found = run(broken, tmp_path)
    assert found.winner is not None
    assert found.winner.config.mesh.fsdp != 8
    assert {(one.reason, one.source) for one in found.ranking if one.error} == {("mesh: breaks", "not compiled")}


def test_a_crashed_compile_is_a_row_and_not_cached(tmp_path: Path, compiler: Compiler):
    def crashes(config: Config, vocab: int | None, target: str, *, timeout: float) -> Plan:
        plan = compiler(config, vocab, target, timeout=timeout)
        if config.mesh.fsdp == 8:
            return Plan(target, "chip", 8, "search", plan.sizes, fits=None, compiled=False, reason="was killed")
        return plan

    found = run(crashes, tmp_path)
    assert found.winner is not None
    assert found.winner.plan is not None
    lost = [one for one in found.ranking if one.error]
    assert {(one.reason, one.source, one.fits) for one in lost} == {("was killed", "not compiled", False)}
    assert len(list(tmp_path.iterdir())) == sum(one.plan is not None for one in found.ranking) == 6


def test_steps_that_exceed_tpu_memory_are_ranked_too(tmp_path: Path):
    def refuses(config: Config, vocab: int | None, target: str, *, timeout: float) -> Plan:
        sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
        return Plan(target, "v5p", 8, "search", sizes, fits=False, reason="RESOURCE_EXHAUSTED", usable=10**9)

    for objective in OBJECTIVES:
        found = search(SMALL, VOCAB, "v5p:2x2x2", predict=refuses, cache=tmp_path, budget=60.0, top=2, jobs=1,
                       objective=objective)  # fmt: skip
        tried = [one for one in found.ranking if one.plan]
        assert tried
        assert {(one.fits, one.reason) for one in tried} == {(False, "RESOURCE_EXHAUSTED")}


def test_an_unwritable_cache_folder_loses_no_plan(tmp_path: Path, compiler: Compiler):
    folder = tmp_path / "file"
    folder.write_text("")
    found = run(compiler, folder, top=2)
    assert sum(one.source == "compiled" for one in found.ranking) == 2
    assert found.summary().count(f"plans could not be cached: {folder}") == 1


def test_a_failed_write_leaves_no_partial_file(tmp_path: Path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxtrain.io.atomic.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        PlanCache(tmp_path).write("key", Plan(H100, "chip", 8, "x", {}, fits=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["[]", "3", '{"target": 3}', '{"tensors": [[1]]}', '{"traffic": [3]}', "\udcff"])
def test_an_invalid_cache_file_counts_as_absent(tmp_path: Path, text: str):
    (tmp_path / "key.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert PlanCache(tmp_path).read("key") is None


def test_measured_plans_are_not_cached(tmp_path: Path):
    def measured(config: Config, vocab: int | None, target: str, *, timeout: float) -> Plan:
        return Plan(target, "cpu", 4, "search", dict.fromkeys(AXES, 1), fits=None, needs=1, step_seconds=1.0)

    found = search(SMALL, VOCAB, "simulate:4", predict=measured, cache=tmp_path, budget=60.0, top=2)
    assert [one.source for one in found.ranking if one.plan] == ["compiled"] * 2
    assert list(tmp_path.iterdir()) == []
    assert found.cache_error == ""


def test_ctrl_c_while_estimating_gives_a_result(tmp_path: Path, compiler: Compiler):
    def interrupt(stage: str, done: int, of: int, what: str) -> None:
        if stage == "estimate" and done >= 512:
            raise KeyboardInterrupt

    before = len(compiler.asked)
    found = run(compiler, tmp_path, progress=interrupt)
    assert (found.counted, found.stopped, len(compiler.asked)) == (512, "interrupted", before)
    assert "interrupted" in found.summary()
    assert "were to be compiled" not in found.summary()  # nothing was to be compiled
    assert found.winner is not None
    assert [one.counted for one in [run(compiler, tmp_path, progress=interrupt, objective="cost")]] == [512]


def test_ctrl_c_before_the_first_estimate_ends_the_search(tmp_path: Path, compiler: Compiler, monkeypatch):
    def interrupted(self: SearchSpace) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SearchSpace, "__iter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(compiler, tmp_path)


def test_a_mesh_that_does_not_fit_is_not_tried_again(tmp_path: Path):
    large = Compiler(needs=1e9)
    found = run(large, tmp_path, top=2, jobs=1)
    tried = {one.estimate.choice.sizes for one in found.ranking if one.plan}
    assert tried
    assert len(large.asked) == len(tried)  # no second one on the same mesh
    assert all("does not fit" in one.reason for one in found.ranking if one.plan)


def test_if_nothing_fits_all_families_have_a_reason():
    config, _ = resolve("configs/models/llama3_70b.yaml", "data.global_batch=64", paths=False)
    found = search(config, None, "h100:1x8", top=0)
    assert found.winner is None
    assert found.ranking == ()
    reasons = {one.family: one.reason for one in found.families}
    assert reasons["fsdp over everything"].startswith("does not fit: ")
    assert "nothing fits" in found.summary()


def test_the_reason_of_an_illegal_family_names_all_devices():
    config, _ = resolve("configs/models/llama3_8b.yaml", "data.global_batch=8", paths=False)
    reasons = {one.family: one.reason for one in search(config, None, "h100:4x8", top=0).families}
    assert reasons["ddp"] == "data.global_batch of 8 sequences can not be split over 32 devices"


def test_families_have_reasons():
    config, _ = resolve("configs/models/llama3_8b.yaml", "data.sequence=8192", "data.global_batch=32", paths=False)
    found = search(config, None, "h100:4x8", top=0)
    reasons = {one.family: one.reason for one in found.families}
    assert reasons["ddp"].startswith("does not fit: 1")
    assert "optimizer state" in reasons["ddp"]
    assert "tensor parallel 16 leaves the node" in reasons["tensor parallel across 8"]
    assert "x slower" in reasons["tensor parallel across 8"]
    assert "slower: tensor parallel" in reasons["tensor parallel inside 8"]
    assert "waiting for other stages" in reasons["pipeline, 1f1b"]
    assert {f"pipeline, {name}" for name in ("gpipe", "zb_h1", "v_half")} <= set(reasons)
    assert found.winner is not None
    assert found.winner.fits
    assert found.winner.estimate.choice.mesh in ("fsdp 32", "data 2 x fsdp 16", "data 32")


def test_a_layout_file_loads_to_the_same_config(tmp_path: Path, found: SearchResult):
    for number, one in enumerate(found.ranking):
        file = write_layout(found, tmp_path / f"{number}.yaml", one)
        loaded = resolve(
            None, f"layout={file}", *(f"model.{k}={v}" for k, v in
            {"embed": 64, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 128, "vocab": VOCAB}.items()),
            "data.sequence=512", "data.global_batch=32", "precision=bf16", *one.keys, paths=False,
        )[0]  # fmt: skip
        assert loaded.model_copy(update={"layout": one.config.layout}) == one.config
    assert len(list(tmp_path.iterdir())) == len(found.ranking)


@pytest.mark.parametrize("wanted", ["pipeline 2 x fsdp 4", "fsdp 2 x context 4", "data 2 x fsdp 2 x model 2", "data 8"])
def test_layouts_of_all_kinds_load_again(tmp_path: Path, found: SearchResult, wanted: str):
    space = SearchSpace(SMALL, 8, VOCAB, slices=2)
    choices = [one for one in space if one.mesh == wanted and one.zero in (0, 2)]
    one = found.ranking[0]
    for choice in choices[:: max(1, len(choices) // 6)]:
        config = space.to_config(choice)
        other = type(one)(one.estimate, config, H100)
        file = tmp_path / "layout.yaml"
        file.write_text(layout_text(found, other))
        loaded = load(None, f"layout={file}")
        for key in ("mesh", "rules", "context_parallel", "zero"):
            assert getattr(loaded, key) == getattr(config, key)
        if config.mesh.pipeline > 1:
            assert loaded.pipeline == config.pipeline


def test_tables_and_json(found: SearchResult):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(ranking_table(found))
    console.print(families_table(found))
    text = console.export_text()
    assert "compiled" in text
    for place, one in enumerate(found.ranking, start=1):  # the seconds of an estimate stand in a column of their own
        name, estimate = f"{one.estimate.choice.mesh}, {one.estimate.choice.options_text}", one.estimate.step_seconds
        (row,) = (line for line in text.splitlines() if line.split()[:1] == [str(place)] and name in line)
        figures = row.partition(f"{name} ")[2].split()
        assert " ".join(figures[:2]) == format_seconds(estimate)
        assert len(figures) == (8 if one.plan else 4), row  # estimate, step, tokens/s, MFU, memory, source; or without
    assert "remat [attention]" in text or "remat none" in text
    values = json.loads(json.dumps(found.as_dict()))
    assert values["ranking"][0]["plan"]["bottleneck"] == "made up"
    assert values["ranking"][0]["keys"][0].startswith("step.microbatches=")


def test_objectives(tmp_path: Path, compiler: Compiler):
    before = len(compiler.asked)
    small = run(compiler, tmp_path, objective="memory", top=0)
    fast = run(compiler, tmp_path, objective="time", top=0)
    cheap = run(compiler, tmp_path, objective="cost", top=0)
    assert len(compiler.asked) == before
    assert not any("were to be compiled" in one.summary() for one in (small, fast, cheap))
    assert small.winner is not None
    assert fast.winner is not None
    assert cheap.winner is not None
    assert small.winner.needs < fast.winner.needs
    assert small.winner.estimate.step_seconds > fast.winner.estimate.step_seconds
    assert cheap.winner.estimate.choice.devices < 8  # so small a model wastes devices
    assert cheap.winner.target.startswith("h100:1x")


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_a_layout_that_is_better_by_estimate_only_says_so(found: SearchResult, objective: Objective):
    one = found.ranking[0].estimate
    better = dataclasses.replace(one, step_seconds=0.8 * one.step_seconds, needs=0.8 * one.needs)
    word = {"time": "faster", "memory": "smaller"}[objective]
    assert why_estimate_is_worse(better, one, objective) == f"20% {word} by estimate, but not compiled"
    assert "within 1%" in why_estimate_is_worse(one, one, objective)
    assert "by estimate" not in why_estimate_is_worse(one, better, objective)


def test_compiled_steps_are_compared_by_their_plans(tmp_path: Path):
    def small(config: Config, vocab: int | None, target: str, *, timeout: float) -> Plan:
        sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
        needs = 10**9 * (1 + len(asked))
        asked.append(needs)
        return Plan(target, "chip", 8, "search", sizes, fits=True, needs=needs, usable=10**11, step_seconds=1.0,
                    memory={"activations": needs})  # fmt: skip

    asked: list[int] = []
    found = run(small, tmp_path, objective="memory", top=2, jobs=1)
    assert found.ranking[1].reason == "2.00 GB, 1.00 GB more activations, temporaries"


def test_schedules_of_other_virtual_stages_are_tried_if_one_does_not_fit():
    options: dict[str, Any] = {"schedule": "interleaved_1f1b", "microbatches": 4}
    choices = [
        LayoutChoice((1, 2, 1, 1, 1, 1, 1), virtual_stages=count, remat=remat, **options)
        for count in (2, 4)
        for remat in ("full", "dots")
    ]

    def bound(choice: LayoutChoice) -> Estimate:
        return Estimate(choice, 10.0 if choice.virtual_stages == 2 else 1.0, 5.0, {}, {}, 0.0, 0.0, 1.0)

    chip = SimpleNamespace(inside=None)
    known: Any = SimpleNamespace(space=FakeSpace(choices), lower_bound=bound, chip=chip, target=targets.parse(H100))
    assert CandidateSet(known, "time").run(time.monotonic() + 60).fitting == 2


class FakeSpace(list):
    devices = 2


def test_numbers_of_devices():
    h100, v5p = targets.parse("h100:8x8"), targets.parse("v5p:4x4x4*2")
    assert str(resize(h100, 256)) == "h100:32x8"
    assert str(resize(h100, 4)) == "h100:1x4"
    assert str(resize(v5p, 64)) == "v5p:4x4x4"
    assert [str(one) for one in smaller_targets(targets.parse("h100:2x4"))] == ["h100:1x4", "h100:1x2", "h100:1x1"]
    shapes = [str(one) for one in smaller_targets(targets.parse("v5p:16x16x24"))]
    assert shapes[:3] == ["v5p:16x16x12", "v5p:8x16x12", "v5p:8x8x12"]
    assert [str(targets.parse(shape)) for shape in shapes] == shapes  # 8x8x6 would not be one
    assert str(resize(targets.parse("simulate:8"), 4)) == "simulate:4"
    with pytest.raises(UserError, match="not whole nodes of 8"):
        resize(h100, 12)
    with pytest.raises(UserError, match="expected simulate:N"):
        resize(targets.parse("local"), 4)


def test_wrong_options(compiler: Compiler, tmp_path: Path):
    with pytest.raises(UserError, match="did you mean `time`"):
        run(compiler, tmp_path, objective="tim")
    free = SMALL.model_copy(update={"model": SMALL.model.model_copy(update={"vocab": None})})
    with pytest.raises(UserError, match=r"model\.vocab"):
        search(free, None, H100)
    odd = SMALL.model_copy(update={"data": SMALL.data.model_copy(update={"sequence": 511, "global_batch": 31})})
    with pytest.raises(UserError, match="no mesh of its devices is legal"):
        search(odd, VOCAB, "h100:1x7", top=0)
    for wrong in ({"jobs": 0}, {"jobs": -1}, {"top": -1}, {"devices": 0}, {"devices": -2, "objective": "cost"}):
        (name, value), *_ = wrong.items()
        with pytest.raises(UserError, match=f"^{name}: expected at least [01], not {value}$"):
            run(compiler, tmp_path, **wrong)


def test_inputs_of_a_cache_key(tmp_path: Path):
    cache = PlanCache(tmp_path)
    key = cache.key(SMALL, VOCAB, H100)
    assert cache.key(SMALL.model_copy(update={"name": "other", "dir": "elsewhere"}), VOCAB, H100) == key
    others = [
        cache.key(SMALL.model_copy(update={"zero": 1}), VOCAB, H100), cache.key(SMALL, VOCAB, "h100:1x8"),
        cache.key(SMALL, 7, H100),
    ]  # fmt: skip
    assert len({key, *others}) == 4
    assert PlanCache().folder == Path("~/.cache/jaxtrain/plan").expanduser()


def test_best_first_orders_pipelines_too(compiler: Compiler):
    candidates = CandidateSet(compiler.cost_model, "time").run(time.monotonic() + 60)
    ordered = list(islice(candidates.best_first(), 400))
    assert any(one.choice.size("pipeline") > 1 for one in ordered)
    seconds = [one.step_seconds for one in ordered]
    assert seconds == sorted(seconds)
    exact = [one.step_seconds for choice in list(compiler.space)[::11] if (one := compiler.cost_model.estimate(choice))]
    assert seconds[0] <= min(exact)
