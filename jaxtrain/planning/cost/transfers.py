"""Transfers of a step to other devices and to its host, priced and summed by axes, operation and network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from jaxtrain.hlo import collectives
from jaxtrain.hlo.parse import Module
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.planning.compile import CompileReport
from jaxtrain.planning.cost import overlap, pipeline_bubble
from jaxtrain.planning.cost.roofline import StepCost
from jaxtrain.planning.hardware.network import CollectiveTime, Fabric
from jaxtrain.planning.result import Traffic
from jaxtrain.sharding.rules import REPLICA_AXIS

EXCHANGE = "exchange"  # operation of replicas that agree loosely, or of islands: a program beside the step's


@dataclass(frozen=True)
class Transfer:
    """A collective or host copy that runs `runs` times a step; `bytes` and `time` are of one run."""

    key: overlap.Key
    axes: str
    op: str
    runs: float
    bytes: float
    time: CollectiveTime
    channel: str


def traffic_rows(
    module: Module, report: CompileReport, cost: StepCost, fabric: Fabric, dcn: Mapping[str, int],
    schedule: Table | None,
) -> list[Traffic]:  # fmt: skip
    """Prices the transfers of a step, longest first; seconds are None if the network is unknown.

    Args:
        module: the compiled program.
        report: of the same program.
        cost: of the same program.
        fabric: network of the target.
        dcn: factor of each axis that spans TPU slices, as in `mesh.dcn`.
        schedule: of pipeline stages, whose actions do not all run in every tick.
    """
    transfers = [*_collectives(module, report, fabric, dcn, schedule), *_host_copies(cost, fabric)]
    times = {one.key: overlap.TransferTime(one.time.seconds or 0.0, one.channel) for one in transfers}
    exposed = overlap.exposed_seconds(module, cost, times)
    rows: dict[tuple[str, str, str], Traffic] = {}
    for one in transfers:
        key = one.axes, one.op, one.time.network
        row = rows.get(key, Traffic(*key, 0, 0, 0.0, 0.0))
        seconds = hidden = None
        if one.time.seconds is not None and row.seconds is not None and row.hidden is not None:
            seconds = row.seconds + one.runs * one.time.seconds
            hidden = row.hidden + one.runs * max(0.0, one.time.seconds - exposed.get(one.key, one.time.seconds))
        rows[key] = Traffic(*key, row.count + round(one.runs), row.bytes + round(one.runs * one.bytes), seconds, hidden)
    return sorted(rows.values(), key=lambda row: (-(row.seconds or 0.0), -row.bytes))


def _collectives(
    module: Module, report: CompileReport, fabric: Fabric, dcn: Mapping[str, int], schedule: Table | None
) -> Iterator[Transfer]:
    loop_runs_per_tick = pipeline_bubble.loop_runs_per_tick(schedule) if schedule else {}
    times: dict[overlap.Key, CollectiveTime] = {}
    for one in collectives.locate_collectives(module, report.sizes, dcn, report.pod):
        key, row = (one.site.computation, one.site.instruction.name), one.collective
        size = row.bytes / max(1, row.count)
        if key not in times:
            times[key] = fabric.collective_time(row.op, one.groups, size)
        runs = row.count * prod(loop_runs_per_tick.get(loop, 1.0) for loop in one.site.once_loops)
        channel = "between slices" if one.site.instruction.op == "send" else "network"
        yield Transfer(key, row.axes_text, row.op, runs, size, times[key], channel)


def _host_copies(cost: StepCost, fabric: Fabric) -> Iterator[Transfer]:
    for one in cost.operations:
        if one.host_bytes:
            time = fabric.host_copy_time(one.host_bytes)
            yield Transfer((one.computation, one.name), "host", one.kind, one.runs, one.host_bytes, time, one.kind)


def exchange_row(report: CompileReport, every: int, fabric: Fabric, compute: float) -> Traffic | None:
    """Returns the mean over `every` steps of what replicas that agree loosely send each other, beside their steps.

    What travels during steps is hidden as far as these compute that long.

    Args:
        report: of the compiled step.
        every: steps of a round.
        fabric: network of the target.
        compute: seconds that a step computes.

    Returns:
        the row; None if there is no exchange, or its time is unknown.
    """
    total, _, during, sending = report.exchange
    time = fabric.exchange_time(total)
    if not total or time.seconds is None:
        return None
    hidden = sending * min(time.seconds * during / total / sending, compute) if sending else 0.0
    return Traffic(REPLICA_AXIS, EXCHANGE, time.network, 1, round(total / every), time.seconds / every, hidden / every)
