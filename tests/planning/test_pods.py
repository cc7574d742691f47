"""Smaller pods compiled instead of a cluster: their choice, collectives on the large mesh, and extrapolation."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from test_collectives import NO_COMPILER, TINY
from wire_theory import QUICK, configured

from jaxtrain.config.schema import Config
from jaxtrain.core.program import build_program
from jaxtrain.hlo import device_groups
from jaxtrain.planning import advice, compile, pods, predict, step_program
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.pods import Pod
from jaxtrain.planning.result import Plan, Traffic
from jaxtrain.sharding.axes import AXES

KEYS = {key.replace("__", "."): value for key, value in TINY.items()}


def chosen(layout: str, mesh: dict[str, int], target: str, largest: int, **changes: Any) -> list[str]:
    config = configured(layout, mesh, {key.replace("__", "."): value for key, value in changes.items()})
    return [str(pod) for pod in pods.smaller_pods(config, targets.parse(target), largest)]


def test_small_targets_are_compiled_as_they_are():
    assert chosen("hsdp", {"data": 4, "fsdp": 8}, "h100:4x8", 32) == []
    assert chosen("hsdp", {"data": 4, "fsdp": 8}, "h100:4x8", 31) == ["h100:2x8 (data 2 instead of 4)"]


def test_replicas_are_left_out_before_shards():
    mesh = {"data": 8, "fsdp": 16}
    assert chosen("hsdp", mesh, "h100:16x8", 64) == ["h100:8x8 (data 4 instead of 8)"]
    assert chosen("hsdp", mesh, "h100:16x8", 32) == ["h100:4x8 (data 2 instead of 8)"]
    assert chosen("hsdp", mesh, "h100:16x8", 16) == [
        "h100:2x8 (data 2 instead of 8, fsdp 8 instead of 16)",
        "h100:1x8 (data 2 instead of 8, fsdp 4 instead of 16)",
    ]
    assert chosen("ddp", {"data": 96}, "h100:12x8", 40) == ["h100:4x8 (data 32 instead of 96)"]


def test_state_spread_over_replicas_takes_two_pods():
    assert chosen("ddp", {"data": 64}, "h100:8x8", 32, zero=1) == [
        "h100:4x8 (data 32 instead of 64)", "h100:2x8 (data 16 instead of 64)",
    ]  # fmt: skip


def test_axes_that_are_neither_replicas_nor_shards_stay():
    assert chosen("tp", {"data": 2, "model": 8}, "h100:2x8", 8) == []
    assert chosen("ep", {"expert": 16}, "h100:2x8", 8, model__moe="{num_experts: 16}") == []
    found = chosen("ep", {"fsdp": 4, "expert": 4}, "h100:2x8", 8, model__moe="{num_experts: 4}")
    assert found == []  # 2 and 1 shards: a second pod would have none
    found = chosen("ep", {"fsdp": 8, "expert": 4}, "h100:4x8", 16, model__moe="{num_experts: 4}")
    assert found == ["h100:2x8 (fsdp 4 instead of 8)", "h100:1x8 (fsdp 2 instead of 8)"]


def test_whole_slices_are_left_out_where_axes_span_them():
    mesh = {"data": 16, "fsdp": 32}
    across = {"mesh__dcn": "{data: 8}"}
    assert chosen("hsdp", mesh, "v5p:4x4x4*8", 256, **across) == ["v5p:4x4x4*4 (data 8 instead of 16)"]
    assert chosen("hsdp", mesh, "v5p:4x4x4*8", 100, **across) == ["v5p:4x4x4*2 (data 4 instead of 16)"]
    assert chosen("hsdp", mesh, "v5p:8x8x8", 256) == []  # one slice has one shape


def test_a_pod_keeps_rows_and_microbatches_of_a_device():
    config = configured("hsdp", {"data": 8, "fsdp": 8}, {"step.microbatches": 4})
    (pod,) = pods.smaller_pods(config, targets.parse("h100:8x8"), 16)
    assert pod.config.mesh.data == 2
    assert pod.config.data.global_batch * 4 == config.data.global_batch
    assert pod.config.step == config.step


@pytest.mark.parametrize("seed", range(8))
def test_groups_of_a_larger_mesh(seed: int):
    """Against the axes of an array of device numbers, moved and reshaped."""
    rng = np.random.default_rng(seed)
    small = dict(zip("abcd", rng.choice([1, 2, 3], 4).tolist()))
    larger = {name: size * int(rng.choice([1, 2, 3])) if size > 1 else 1 for name, size in small.items()}
    for count in range(1, 5):
        for joined in itertools.combinations(range(4), count):
            made = device_groups.expand_groups(along(joined, small), small, larger)
            assert {frozenset(group) for group in made} == {frozenset(group) for group in along(joined, larger)}


def along(joined: tuple[int, ...], sizes: dict[str, int]) -> device_groups.Groups:
    """Groups of the devices that differ along some axes alone."""
    devices = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    rest = [at for at in range(4) if at not in joined]
    rows = devices.transpose(*rest, *joined).reshape(-1, prod(list(sizes.values())[at] for at in joined))
    return tuple(tuple(row) for row in rows.tolist())


def test_moves_between_devices_keep_their_direction():
    pairs = ((0, 4), (1, 5), (4, 0), (5, 1), (2, 6), (3, 7), (6, 2), (7, 3))  # along a; 2 of b, 2 of c
    made = device_groups.expand_groups(pairs, {"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 6, "c": 2})
    assert sorted(made) == sorted((i, (i + 12) % 24) for i in range(24))


def test_groups_that_can_not_be_expanded():
    sizes, larger = {"a": 4, "b": 2}, {"a": 8, "b": 2}
    with pytest.raises(ValueError, match="join a part of a"):
        device_groups.expand_groups(((0, 2), (1, 3), (4, 6), (5, 7)), sizes, larger)
    with pytest.raises(ValueError, match="groups differ along a"):
        device_groups.expand_groups(((0, 1), (2,), (3,), (4, 5), (6, 7)), sizes, larger)


def reports(whole: Config, small: Config) -> tuple[compile.CompileReport, compile.CompileReport]:
    """Of a config compiled as it is, and from a pod."""
    count = prod(getattr(small.mesh, axis) for axis in AXES)
    programs = [
        build_program(config, config.model.vocab, jax.devices()[:n]) for config, n in ((whole, 8), (small, count))
    ]
    own, pod = (step_program.compile_step(program) for program in programs)
    return (
        compile.report_program(programs[0], own, "simulate:8", "cpu"),
        compile.report_program(programs[0], pod, "simulate:8", "cpu", pod=programs[1]),
    )


LAYOUTS = {
    "ddp": ("ddp", {"data": 8}, {}),
    "ddp with microbatches": ("ddp", {"data": 8}, {"step.microbatches": 2}),
    "hsdp": ("hsdp", {"data": 4, "fsdp": 2}, {}),
    "tensor parallel": ("tp", {"data": 4, "model": 2}, {}),
    "pipeline": ("pp", {"pipeline": 2, "data": 4}, {"step.microbatches": 4}),
    "num_experts": ("ep", {"data": 4, "expert": 2}, {"model.moe": "{num_experts: 4}", "rules.batch": "[data, expert]"}),
    "fsdp": ("fsdp", {"fsdp": 8}, {}),
    "ZeRO 1": ("ddp", {"data": 8}, {"zero": 1}),
    "ZeRO 2": ("ddp", {"data": 8}, {"zero": 2}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pods_collectives_are_those_of_the_whole(name: str):
    layout, mesh, changes = LAYOUTS[name]
    config = configured(layout, mesh, {**KEYS, **changes})
    pod = pods.smaller_pods(config, targets.parse("simulate:8"), 4)[0]
    whole, told = reports(config, pod.config)
    assert (told.sizes, told.layout, told.state_bytes) == (whole.sizes, whole.layout, whole.state_bytes)
    assert told.weight_and_gradient_bytes == whole.weight_and_gradient_bytes
    assert told.memory.arguments == whole.memory.arguments
    assert {key: count for key, (count, _) in by_kind(told).items()} == {
        key: n for key, (n, _) in by_kind(whole).items()
    }
    for key, (_, size) in by_kind(whole).items():
        assert by_kind(told)[key][1] == pytest.approx(size, rel=0.005), key  # what is cut twice is a part of a shard
    if not pod.sharded:
        assert told.collectives == whole.collectives
        assert dataclasses.replace(told.memory, peak=whole.memory.peak) == whole.memory


def by_kind(report: compile.CompileReport) -> dict[tuple, tuple[int, int]]:
    out: dict[tuple, tuple[int, int]] = {}
    for row in report.collectives:
        count, size = out.get((row.op, row.axes), (0, 0))
        out[row.op, row.axes] = count + row.count, size + row.bytes
    return out


def test_a_pod_whose_axes_cross_other_nodes_is_refused(monkeypatch):
    config = configured("hsdp", {"data": 4, "fsdp": 2}, KEYS)
    (pod,) = pods.smaller_pods(config, targets.parse("simulate:8"), 4)
    elsewhere = {"config": pod.config.model_dump(mode="json"), "target": "simulate:4"}
    whole = build_program(config, config.model.vocab, jax.devices())
    assert compile._build_pod(elsewhere, config.model.vocab, whole, "simulate:8", None).layout.sizes["data"] == 2
    monkeypatch.setattr(compile.network, "axes_crossing_domains", lambda positions, sizes: {"data": sizes["data"] == 4})
    with pytest.raises(compile.PodMismatch, match="on simulate:4 cross other nodes or slices than on simulate:8"):
        compile._build_pod(elsewhere, config.model.vocab, whole, "simulate:8", None)


def made(shards: int, **known: Any) -> Plan:
    """A step of which every figure is a constant and a part that shards share out."""
    kinds = {"matmul": 2.0, "elementwise": 0.5 + 4 / shards}
    traffic = (Traffic("fsdp", "all-gather", "NVLink", 3, 10**9, 1.0 + 8 / shards, 0.5 + 4 / shards),)
    computing = sum(kinds.values())
    needs = 10**9 + 64 * 10**9 // shards
    exposed = sum(row.exposed for row in traffic)
    return Plan(
        "h100:8x8", "h100", 64, "fsdp", {"fsdp": 64}, True, needs=needs, usable=80 * 10**9,
        memory={"params": 64 * 10**9 // shards, "activations": 10**9}, traffic=traffic, compute_seconds=computing,
        exposed_seconds=exposed, seconds_by={"kind": kinds}, step_seconds=computing + exposed,
        mfu=1 / (computing + exposed), tokens=1000, **known,
    )  # fmt: skip


def test_two_pods_extrapolate_a_line_over_shards(monkeypatch):
    monkeypatch.setattr(advice, "suggest", lambda config, plan: [])
    config = configured("fsdp", {"fsdp": 64}, KEYS)
    told, whole = predict.extrapolate(config, made(16), made(8), (64, 16, 8)), made(64)
    for name in ("needs", "memory", "compute_seconds", "exposed_seconds", "step_seconds", "mfu"):
        assert getattr(told, name) == pytest.approx(getattr(whole, name)), name
    assert told.seconds_by["kind"] == pytest.approx(whole.seconds_by["kind"])
    assert told.traffic[0].seconds == pytest.approx(whole.traffic[0].seconds)
    assert told.traffic[0].bytes == whole.traffic[0].bytes


def test_a_plan_from_a_pod_says_so(monkeypatch):
    config = configured("hsdp", {"data": 8, "fsdp": 8}, KEYS)
    asked = []

    def measured(config: Config, vocab, target: str, **kwargs) -> str:
        asked.append((target, None))
        return target

    def together(config: Config, vocab, target: str, found: Sequence[Pod], **kwargs) -> list[str]:
        asked.extend((target, str(pod)) for pod in found)
        if "4x8" in str(found[0]):
            raise compile.PodMismatch("its groups differ")
        return [target for _ in found]

    monkeypatch.setattr(compile, "compile_report", measured)
    monkeypatch.setattr(compile, "compile_reports", together)
    monkeypatch.setattr(predict, "assess", lambda config, report, dcn: made(8))
    plan = predict.predict(config, None, "h100:8x8", max_devices=16)
    assert asked == [("h100:8x8", "h100:2x8 (data 2 instead of 8)")]
    assert plan.pods == ("h100:2x8 (data 2 instead of 8)",)
    assert Plan.from_dict(plan.as_dict()).pods == plan.pods

    asked.clear()
    plan = predict.predict(config, None, "h100:8x8", max_devices=32)
    assert asked == [("h100:8x8", "h100:4x8 (data 4 instead of 8)"), ("h100:8x8", None)]
    assert plan.pods == ()
    assert plan.notes[-1] == "compiled as it is, since no smaller pod represents it: its groups differ"

    asked.clear()
    assert predict.predict(config, None, "h100:8x8", max_devices=None).pods == ()
    assert asked == [("h100:8x8", None)]


def test_a_step_that_does_not_fit_a_pod_of_equal_shards_does_not_fit(monkeypatch):
    asked = []

    def measured(config: Config, vocab, target: str, **kwargs) -> str:
        asked.append(None)
        return target

    def together(config: Config, vocab, target: str, found: Sequence[Pod], **kwargs) -> list[str]:
        asked.append(found)
        raise compile.StepTooLarge("needs more", 10**12)

    monkeypatch.setattr(compile, "compile_report", measured)
    monkeypatch.setattr(compile, "compile_reports", together)
    monkeypatch.setattr(predict, "assess", lambda config, report, dcn: made(64))
    plan = predict.predict(configured("hsdp", {"data": 8, "fsdp": 8}, KEYS), None, "h100:8x8", max_devices=32)
    assert (plan.fits, plan.needs, plan.devices, len(plan.pods), len(asked)) == (False, 10**12, 64, 1, 1)
    plan = predict.predict(configured("fsdp", {"fsdp": 64}, KEYS), None, "h100:8x8", max_devices=32)
    assert (plan.fits, plan.pods, asked[-1]) == (True, (), None)  # whose shards are smaller


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize(
    ("layout", "mesh", "changes"),
    [
        ("hsdp", {"data": 8, "fsdp": 8}, {}),
        pytest.param("fsdp", {"fsdp": 64}, {}, marks=pytest.mark.matrix),
        pytest.param("ddp", {"data": 64}, {"zero": 1}, marks=pytest.mark.matrix),
    ],
)
def test_plans_of_absent_gpus_from_pods(monkeypatch, layout: str, mesh: dict[str, int], changes: dict[str, Any]):
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK}")
    config = configured(layout, mesh, changes)
    whole, told = (predict.predict(config, None, "h100:8x8", max_devices=count) for count in (None, 32))
    assert told.pods
    assert told.needs == pytest.approx(whole.needs, rel=0.02)
    assert told.compute_seconds == pytest.approx(whole.compute_seconds, rel=0.01)
    assert told.wire_bytes == pytest.approx(whole.wire_bytes, rel=0.01)
    assert told.step_seconds == pytest.approx(whole.step_seconds, rel=0.1)
    assert told.sizes == whole.sizes
