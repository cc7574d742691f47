"""Transfers of a step to other devices and to its host, priced and summed by axes, operation and network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from jaxtrain.hlo import collectives
from jaxtrain.hlo.parse import Module
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.planning.compile import Report
from jaxtrain.planning.cost import overlap, pipeline_bubble
from jaxtrain.planning.cost.roofline import Cost
from jaxtrain.planning.hardware.network import CollectiveTime, Fabric
from jaxtrain.planning.result import Traffic


@dataclass(frozen=True)
class Moved:
    """Something that moves, `runs` times a step; `bytes` and `price` are of one run."""

    key: overlap.Key
    axes: str
    op: str
    runs: float
    bytes: float
    price: CollectiveTime
    wires: str


def rows(
    module: Module, report: Report, cost: Cost, fabric: Fabric, across: Mapping[str, int], schedule: Table | None
) -> list[Traffic]:
    """Returns the transfers, longest first; seconds are None if the network is unknown.

    Args:
        across: part of each axis that spans TPU slices, as in `mesh.dcn`.
        schedule: of pipeline stages, whose actions do not all run in every tick.
    """
    moved = [*_collectives(module, report, fabric, across, schedule), *_host_copies(cost, fabric)]
    moving = {one.key: overlap.Move(one.price.seconds or 0.0, one.wires) for one in moved}
    waits = overlap.waits(module, cost, moving)
    found: dict[tuple[str, str, str], Traffic] = {}
    for one in moved:
        key = one.axes, one.op, one.price.network
        seconds = hidden = None
        if one.price.seconds is not None:
            seconds = one.runs * one.price.seconds
            hidden = one.runs * max(0.0, one.price.seconds - waits.get(one.key, one.price.seconds))
        old = found.get(key, Traffic(*key, 0, 0, 0.0, 0.0))
        found[key] = Traffic(
            *key, old.count + round(one.runs), old.bytes + round(one.runs * one.bytes),
            _sum(old.seconds, seconds), _sum(old.hidden, hidden),
        )  # fmt: skip
    return sorted(found.values(), key=lambda row: (-(row.seconds or 0.0), -row.bytes))


def _collectives(
    module: Module, report: Report, fabric: Fabric, across: Mapping[str, int], schedule: Table | None
) -> Iterator[Moved]:
    shares = pipeline_bubble.shares(schedule) if schedule else {}
    prices: dict[overlap.Key, CollectiveTime] = {}
    for one in collectives.located(module, report.sizes, across, report.pod):
        key, row = (one.site.computation, one.site.instruction.name), one.collective
        size = row.bytes / max(1, row.count)
        if key not in prices:
            prices[key] = fabric.price(row.op, one.joined, size)
        runs = row.count * prod(shares.get(turn, 1.0) for turn in one.site.turns)
        wires = "between slices" if one.site.instruction.op == "send" else "network"
        yield Moved(key, row.where, row.op, runs, size, prices[key], wires)


def _host_copies(cost: Cost, fabric: Fabric) -> Iterator[Moved]:
    for one in cost.operations:
        if one.host:
            price = fabric.to_host(one.host)
            yield Moved((one.where, one.name), "host", one.kind, one.times, one.host, price, one.kind)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
