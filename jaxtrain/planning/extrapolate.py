"""Extrapolation from the plans of two smaller pods to that of the whole.

A pod has fewer shards than the whole (`plan.pods`), and each is larger. What a device keeps, reads and writes is
constant but for its shards, so that it is a line over 1 / shards: a second pod, of fewer shards still, gives its slope.
Collectives are priced for the whole already: there, what is left of a slope is what they take of larger shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.planning import advice
from jaxtrain.planning.result import Plan, Traffic


def extrapolated(config: Config, near: Plan, far: Plan, shards: tuple[int, int, int]) -> Plan:
    """The plan of the whole.

    Args:
        near, far: of the larger pod, and of the smaller one.
        shards: of the whole, of `near` and of `far`; falling.
    """
    whole, more, less = (1 / count for count in shards)
    share = (more - whole) / (less - more)  # of what `far` has more than `near`, by which the whole has less
    numbers = (
        "memory", "needs", "flops_compiled", "compute_seconds", "bubble_seconds", "seconds_by", "flops_by", "bytes_by",
    )  # fmt: skip
    made: dict[str, Any] = {name: _line(getattr(near, name), getattr(far, name), share) for name in numbers}
    made["traffic"], step = _traffic(near, far, share), None
    if made["compute_seconds"] is not None and near.exposed_seconds is not None:
        made["exposed_seconds"] = sum(row.exposed for row in made["traffic"])
        step = made["compute_seconds"] + made["exposed_seconds"] + made["bubble_seconds"]
    slower = near.step_seconds / step if near.step_seconds and step else None
    for rate in ("mfu", "hfu"):
        value = getattr(near, rate)
        made[rate] = value * slower if value and slower else None
    plan = replace(near, step_seconds=step, compile_seconds=max(near.compile_seconds, far.compile_seconds), **made)
    return replace(plan, limit=advice.limit(plan), advice=tuple(advice.changes(config, plan)))


def _line(near: Any, far: Any, share: float) -> Any:
    """Numbers, and those in mappings; none is negative."""
    if isinstance(near, Mapping):
        names = dict.fromkeys((*near, *far))
        return {name: _line(near.get(name, 0), far.get(name, 0), share) for name in names}
    if near is None or far is None:
        return None
    value = max(0.0, near + share * (near - far))
    return round(value) if isinstance(near, int) and isinstance(far, int) else value


def _traffic(near: Plan, far: Plan, share: float) -> tuple[Traffic, ...]:
    """Rows of the larger pod, longest first.

    They hide as much as there: the compiler's order of what it starts when changes by steps with the size of groups.
    """
    others = {(row.axes, row.op, row.network): row for row in far.traffic}
    rows = []
    for row in near.traffic:
        other = others.get((row.axes, row.op, row.network), row)
        seconds, hidden = _line(row.seconds, other.seconds, share), row.hidden
        if hidden is not None and row.seconds:
            hidden *= seconds / row.seconds
        rows.append(replace(row, bytes=_line(row.bytes, other.bytes, share), seconds=seconds, hidden=hidden))
    return tuple(sorted(rows, key=lambda row: (-(row.seconds or 0.0), -row.bytes)))
