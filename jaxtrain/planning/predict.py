"""Prediction of a `Plan` for a config on a target, compiled in child processes, as it is or in smaller pods.

A pod has fewer shards than the full cluster (`planning.pods`), and each is larger. The bytes that a device holds, reads
and writes are linear in 1 / shards; a second pod with fewer shards gives the slope. Collectives are priced for the full
cluster already; their slope is only that of the size of the shards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.island_config import program_config
from jaxtrain.core.resolve import with_layout
from jaxtrain.planning import advice, compile, islands, pods
from jaxtrain.planning.assess import assess, tokens_of
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.pods import Pod
from jaxtrain.planning.result import Plan, Traffic
from jaxtrain.sharding.layout import resolve_layout

EXTRAPOLATED = (
    "memory", "needs", "flops_compiled", "compute_seconds", "bubble_seconds", "seconds_by", "flops_by", "bytes_by",
)  # fmt: skip


def predict(
    config: Config, vocab: int | None, target: str, *, slices: int | None = None, hlo: Path | None = None,
    timeout: float = compile.TIMEOUT, max_devices: int | None = pods.MAX_DEVICES,
    dcn: str | None = None, server_dcn: str | None = None,
) -> Plan:  # fmt: skip
    """Plans a config's train step on devices that need not be present.

    A step that needs more memory than a device has gives a plan that does not fit; one on which the compiler or the
    model's code crashes gives a plan that was not compiled. Both have the reason.

    Args:
        config: to plan; of islands the plan is that of one, see `islands`.
        vocab: vocabulary size of the tokenizer; None for `model.vocab`.
        target: as `targets.parse` takes it.
        slices: number of TPU slices.
        hlo: file to which the text of the compiled program is written; of smaller pods, the larger one's.
        timeout: seconds to compile in.
        max_devices: number of devices above which smaller pods are compiled instead, if possible
            (`pods.smaller_pods`); None: never.
        dcn: rate of the link between replicas, see `assess`, or of the link of an island.
        server_dcn: rate of the link of a server of islands; None: that of an island.

    Returns:
        the plan, also if the config does not fit or does not compile.

    Raises:
        UserError: an unknown target, a package that is not installed, or a layout that does not fit.
    """
    config = with_layout(config, paths=False)
    if config.islands.has_islands:
        options = {"slices": slices, "hlo": hlo, "timeout": timeout, "max_devices": max_devices}
        plan = predict(program_config(config), vocab, target, **options)
        return islands.with_islands(config, plan, dcn, server_dcn)
    parsed, deadline = targets.parse(target, slices), time.monotonic() + timeout
    smaller, notes = () if max_devices is None else pods.smaller_pods(config, parsed, max_devices), ()
    try:
        if smaller:
            return _predict_from_pods(config, vocab, parsed, smaller, hlo, timeout, dcn)
    except (compile.PodMismatch, compile.StepTooLarge, compile.CompileCrashed) as error:
        if isinstance(error, compile.StepTooLarge) and len(smaller) == 1:  # its shards are as large as the cluster's
            plan = _failed_plan(config, parsed, fits=False, reason=str(error), needs=error.needs or 0)
            return replace(plan, pods=tuple(map(str, smaller)))
        notes = (f"compiled as it is, since no smaller pod represents it: {error}",)
    timeout = max(1.0, deadline - time.monotonic())
    try:
        report = compile.compile_report(config, vocab, str(parsed), hlo=hlo, timeout=timeout)
    except compile.StepTooLarge as error:
        return _failed_plan(config, parsed, fits=False, reason=str(error), needs=error.needs or 0)
    except compile.CompileCrashed as error:
        return _failed_plan(config, parsed, fits=None, compiled=False, reason=str(error))
    plan = assess(config, report, dcn)
    return replace(plan, notes=(*plan.notes, *notes))


def _predict_from_pods(
    config: Config, vocab: int | None, target: targets.Target, smaller: Sequence[Pod], hlo: Path | None, timeout: float,
    dcn: str | None,
) -> Plan:  # fmt: skip
    """Plans from one or two smaller pods, compiled in parallel."""
    reports = compile.compile_reports(config, vocab, str(target), smaller, hlo=hlo, timeout=timeout)
    plans = [assess(config, report, dcn) for report in reports]
    plan = plans[0] if len(plans) == 1 else extrapolate(config, *plans, shards=pods.shard_counts(*smaller))
    return replace(plan, pods=tuple(map(str, smaller)))


def _failed_plan(config: Config, target: targets.Target, **fields: Any) -> Plan:
    """The plan of a step that does not fit or does not compile."""
    layout = None
    if target.devices:
        layout = resolve_layout(config.layout, config.mesh, config.axis_rules, target.devices)
    plan = Plan(
        str(target), target.kind, target.devices or 0, str(layout or config.layout),
        dict(layout.sizes) if layout else {}, usable=int(target.chip.usable.value) if target.chip else None,
        tokens=tokens_of(config), steps=config.steps, **fields,
    )  # fmt: skip
    return advice.with_advice(config, plan) if layout else replace(plan, bottleneck=advice.bottleneck(plan))


def extrapolate(config: Config, near: Plan, far: Plan, shards: tuple[int, int, int]) -> Plan:
    """Extrapolates the plan of the full cluster from those of two pods.

    Args:
        config: of the full cluster.
        near: plan of the larger pod.
        far: plan of the smaller pod.
        shards: numbers of shards of the cluster, of `near` and of `far`; decreasing.

    Returns:
        the plan of the cluster.
    """
    full, more, fewer = (1 / count for count in shards)
    slope = (more - full) / (fewer - more)
    values: dict[str, Any] = {
        name: _extrapolate(getattr(near, name), getattr(far, name), slope) for name in EXTRAPOLATED
    }
    values["traffic"], step = _traffic(near, far, slope), None
    if values["compute_seconds"] is not None and near.exposed_seconds is not None:
        values["exposed_seconds"] = sum(row.exposed for row in values["traffic"])
        step = values["compute_seconds"] + values["exposed_seconds"] + values["bubble_seconds"]
    ratio = near.step_seconds / step if near.step_seconds and step else None
    for rate in ("mfu", "hfu"):
        value = getattr(near, rate)
        values[rate] = value * ratio if value and ratio else None
    seconds = max(near.compile_seconds, far.compile_seconds)
    return advice.with_advice(config, replace(near, step_seconds=step, compile_seconds=seconds, **values))


def _extrapolate(near: Any, far: Any, slope: float) -> Any:
    """Extrapolates numbers, or those in mappings; at least 0."""
    if isinstance(near, Mapping):
        names = dict.fromkeys((*near, *far))
        return {name: _extrapolate(near.get(name, 0), far.get(name, 0), slope) for name in names}
    if near is None or far is None:
        return None
    value = max(0.0, near + slope * (near - far))
    return round(value) if isinstance(near, int) and isinstance(far, int) else value


def _traffic(near: Plan, far: Plan, slope: float) -> tuple[Traffic, ...]:
    """Extrapolates the traffic of the full cluster.

    The hidden fraction is that of the larger pod: the compiler's order of starts changes in steps with the group size.

    Returns:
        the traffic, longest first.
    """
    others = {(row.axes, row.op, row.network): row for row in far.traffic}
    rows = []
    for row in near.traffic:
        other = others.get((row.axes, row.op, row.network), row)
        seconds, hidden = _extrapolate(row.seconds, other.seconds, slope), row.hidden
        if hidden is not None and row.seconds:
            hidden *= seconds / row.seconds
        rows.append(replace(row, bytes=_extrapolate(row.bytes, other.bytes, slope), seconds=seconds, hidden=hidden))
    return tuple(sorted(rows, key=lambda row: (-(row.seconds or 0.0), -row.bytes)))
