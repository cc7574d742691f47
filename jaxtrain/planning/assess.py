"""Assessment of a compiled step: counts and prices its operations and transfers, and returns a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.hlo import parse
from jaxtrain.hlo.collectives import shorten_scope
from jaxtrain.hlo.memory_traffic import HOST
from jaxtrain.hlo.parse import Instruction, Module
from jaxtrain.models.flops import decoder_flops, mean_attended
from jaxtrain.models.spec import has_token_rows, is_decoder
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.planning import advice
from jaxtrain.planning.compile import CompileReport
from jaxtrain.planning.cost import memory, pipeline_bubble, transfers
from jaxtrain.planning.cost.roofline import Operation, StepCost, analyze
from jaxtrain.planning.hardware import calibration, chips, targets
from jaxtrain.planning.hardware.chips import Chip, Figure
from jaxtrain.planning.hardware.link_rate import parse_rate
from jaxtrain.planning.hardware.network import Fabric, SlowLink, axes_crossing_domains
from jaxtrain.planning.result import Plan, Traffic
from jaxtrain.sharding.rules import REPLICA_AXIS

MAX_ROWS = 8  # tensors and buffers that a plan names
MALLOC_KEEPS = 2**25  # bytes of the largest block that glibc keeps after free (DEFAULT_MMAP_THRESHOLD_MAX)
GROUPINGS = ("phase", "part", "kind")  # of operations
NOT_ALLOCATED = (
    "parameter", "get-tuple-element", "tuple", "while", "bitcast", "conditional", "copy-done", "constant"
)  # fmt: skip


def _fabric(report: CompileReport, dcn: str | None) -> Fabric:
    """Network, chip and calibration of the target, of JAX's devices, or of a CPU as measured; `dcn`: see `assess`."""
    slow = SlowLink(dcn, parse_rate(dcn), report.sizes[REPLICA_AXIS]) if dcn else None
    if rates := report.cpu_rates:
        measured = replace(calibration.MEASURED, launch=rates["launch"])
        return Fabric(_cpu_chip(rates, len(report.positions)), measured, (), report.positions, slow)
    target = targets.parse(report.target)
    chip = target.chip or chips.chip_of_device(report.device_kind)
    torus = target.shape if target.platform == "tpu" else ()
    return Fabric(chip, calibration.calibration_of(chips.chip_kind(chip)), torus, report.positions, slow)


def _replica_rate(fabric: Fabric, sizes: Mapping[str, int]) -> float | None:
    """Rate of `Plan.replica_rate`."""
    replicas = sizes[REPLICA_AXIS]
    seconds = fabric.exchange_time(1.0).seconds if replicas > 1 else None
    return len(fabric.positions) / replicas / seconds if seconds else None


def _cpu_chip(rates: Mapping[str, float], devices: int) -> Chip:
    figures = {key: Figure(value, "measured on this host") for key, value in rates.items()}
    unknown = Figure(0, "unknown")
    network = None
    if "copy" in figures:
        network = chips.SharedMemory(figures["copy"], figures["reduce"], figures["barrier"], devices)
    peak = {"bf16": figures["flops"], "fp32": figures["flops"]}
    return Chip("cpu", peak, unknown, unknown, figures["memory"], network)


def assess(config: Config, report: CompileReport, dcn: str | None = None) -> Plan:
    """Makes the plan of a compiled step.

    Args:
        config: the config.
        report: of its compiled step.
        dcn: rate of the link between replicas, see `parse_rate`; None: the network of the target.
    """
    fabric, module = _fabric(report, dcn), parse.parse(report.text)
    chip = fabric.chip
    schedule = pipeline_bubble.schedule_table(config.pipeline, report.sizes["pipeline"], config.step.microbatches)
    cost = _add_page_allocation(_step_cost(config, module, fabric, schedule), report)
    traffic = transfers.traffic_rows(module, report, cost, fabric, config.mesh.dcn, schedule)
    exchange = transfers.exchange_row(report, config.sync.every, fabric, cost.seconds) if chip else None
    if exchange is not None:
        traffic = sorted([*traffic, exchange], key=lambda row: (-(row.seconds or 0.0), -row.bytes))
    # Simulated stages that wait leave the cores to the others.
    bubble = pipeline_bubble.bubble_seconds(schedule, cost) if schedule and chip and not report.cpu_rates else 0.0
    compute = exposed = step = None
    if chip:
        compute = cost.seconds
        if all(row.seconds is not None for row in traffic):
            exposed = sum(row.exposed for row in traffic)
            step = compute + exposed + bubble
    model_flops, hardware_flops = _flops(config, report)
    plan = Plan(
        report.target, report.device_kind, len(report.positions), report.layout, report.sizes,
        crosses=axes_crossing_domains(report.positions, report.sizes),
        **_memory(report, chip, memory.attention_workspace(module)),
        buffers=tuple(largest_buffers(module)), tensors=tuple(report.tensors[:MAX_ROWS]), traffic=tuple(traffic),
        tree_bytes=report.tree_bytes, replica_rate=_replica_rate(fabric, report.sizes),
        flops_model=model_flops, flops_hardware=hardware_flops, flops_compiled=cost.flops(),
        compute_seconds=compute, exposed_seconds=exposed, bubble_seconds=bubble,
        seconds_by={key: cost.by(key) for key in GROUPINGS} if chip else {},
        flops_by={key: cost.by(key, value="flops") for key in GROUPINGS},
        bytes_by={key: cost.by(key, value="bytes") for key in GROUPINGS},
        step_seconds=step, mfu=_utilization(model_flops, step, chip), hfu=_utilization(hardware_flops, step, chip),
        tokens=tokens_of(config), steps=config.steps,
        notes=tuple(_notes(config, report, chip, cost, schedule, exchange)), compile_seconds=report.seconds,
    )  # fmt: skip
    return advice.with_advice(config, plan)


def tokens_of(config: Config) -> int:
    """Tokens of a global batch, or its rows for a user's own data."""
    return config.data.global_batch * (config.data.sequence if has_token_rows(config.model, config.data) else 1)


def _utilization(flops: float | None, step: float | None, chip: Chip | None) -> float | None:
    """Share of the bfloat16 peak, as runs report it."""
    return flops / step / chip.flops("bf16") if flops and step and chip else None


def _step_cost(config: Config, module: Module, fabric: Fabric, schedule: Table | None) -> StepCost:
    def branch_weights(instruction: Instruction, seconds: Sequence[float]) -> Sequence[float] | None:
        if schedule and (weights := pipeline_bubble.branch_weights(schedule, instruction)):
            return weights
        if "attention_cudnn" in instruction.scope:  # assumes few enough documents in a row for the fast packed kernel
            return [float(index == seconds.index(min(seconds))) for index in range(len(seconds))]
        return None

    rates = calibration.achieved_rates(fabric.chip, fabric.calibration) if fabric.chip else None
    sequence = config.data.sequence
    visible = mean_attended(config.model, sequence) / sequence
    return analyze(module, rates, branch_weights=branch_weights, visible=visible)


def _add_page_allocation(cost: StepCost, report: CompileReport) -> StepCost:
    """Adds the time to allocate temporaries that malloc returns to the system after every step on CPU."""
    if not report.cpu_rates or report.memory.temporaries <= MALLOC_KEEPS:
        return cost
    seconds = report.memory.temporaries / report.cpu_rates["pages"]
    return replace(cost, operations=[*cost.operations, Operation("pages", "pages", "pages", seconds=seconds)])


def _flops(config: Config, report: CompileReport) -> tuple[float | None, float | None]:
    """FLOPs of a step on one device: of the model, and of the hardware (with rematerialisation)."""
    devices = max(1, len(report.positions))
    if not is_decoder(config.model):
        return (report.user_flops / devices if report.user_flops else None), None
    if report.vocab is None:
        return None, None
    flops = decoder_flops(
        config.model, report.vocab, config.data.sequence, config.step.saved_values, report.recomputes_logits
    )  # fmt: skip
    tokens = tokens_of(config) / devices
    return flops.model * tokens, None if flops.hardware is None else flops.hardware * tokens


def _memory(report: CompileReport, chip: Chip | None, workspace: int) -> dict[str, Any]:
    """`fits`, `reason`, `needs`, `usable` and `memory` of a plan; the compiler's memory excludes `workspace`."""
    planned, held, state = report.memory, report.weight_and_gradient_bytes, report.state_bytes
    is_tpu, usable = _is_tpu(report), int(chip.usable.value) if chip and chip.usable.value else None
    compiled = planned.total
    if is_tpu and usable:  # temporaries include holes between buffers; what compiles fits
        compiled = min(compiled, usable) if planned.is_host_peak else planned.peak
    temporaries = max(0, compiled - planned.arguments - max(0, planned.outputs - planned.aliased))
    gradients = min(temporaries, held.get("gradients", 0))
    gathered = min(temporaries - gradients, held.get("weights", 0) + held.get("gathered", 0))
    kinds = {
        "params": state.get("params", 0),
        "optimizer": sum(size for part, size in state.items() if part not in ("params", "sync")),
        "sync": state.get("sync", 0),
        "batch": max(0, planned.arguments - sum(state.values())),
        "gradients": gradients,
        "gathered": gathered,
        "activations": temporaries - gradients - gathered,
        "workspace": workspace,
        "host": planned.host,
    }
    needs = compiled + workspace
    fits = None if usable is None else is_tpu or needs <= usable
    reason = f"needs {needs / 1e9:.1f} GB of {usable / 1e9:.1f} GB" if usable and not fits else ""
    return {"fits": fits, "reason": reason, "needs": needs, "usable": usable, "memory": kinds}


def _is_tpu(report: CompileReport) -> bool:
    return targets.parse(report.target).platform == "tpu"


def largest_buffers(module: Module, count: int = MAX_ROWS) -> list[tuple[str, str, int]]:
    """Largest arrays that a program allocates on the device, (shape, scope, bytes), each shape and scope once."""
    sizes: dict[tuple[str, str], int] = {}
    for name in _running_computations(module, module.entry, set()):
        for one in module.computations[name].values():
            if one.op in NOT_ALLOCATED or one.op.endswith("-done"):
                continue
            for leaf in one.result.leaves:
                if leaf.memory_space != HOST:
                    shape = f"{leaf.dtype}[{','.join(map(str, leaf.dims))}]"
                    sizes[shape, shorten_scope(one.scope)] = leaf.bytes
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return [(shape, scope, size) for (shape, scope), size in ordered[:count]]


def _running_computations(module: Module, name: str, seen: set[str]) -> set[str]:
    """Computations that run outside of fusions."""
    if name not in seen and name in module.computations:
        seen.add(name)
        for one in module.computations[name].values():
            inside = [*one.branches, *(one.called if one.op in ("call", "async-start") else [])]
            for part in (*inside, *([one.attribute("body")] if one.op == "while" else [])):
                _running_computations(module, part, seen)
    return seen


def _notes(
    config: Config, report: CompileReport, chip: Chip | None, cost: StepCost, schedule: Table | None,
    exchange: Traffic | None,
) -> list[str]:  # fmt: skip
    notes = []
    if config.sync.is_stale:
        notes.append("a step is one update of the server; gradients of all workers are computed, those that push count")
    elif config.sync.is_loose and report.exchange[0]:
        notes.append(_exchange_note(config.sync, report, exchange))
    elif report.phases:
        notes.append(_phases_note(report.phases))
    if names := cost.unknown_kernels:
        notes.append(f"kernels of unknown FLOPs are priced by their memory traffic: {', '.join(names[:4])}")
    if any(one.is_unbounded for one in cost.operations):
        notes.append("a loop of unknown length counts once")
    if _is_tpu(report) and report.memory.host and report.memory.is_host_peak:
        notes.append("offloaded memory exceeds the device's temporaries, so device memory is an upper bound")
    if schedule and not report.cpu_rates:
        notes.append("pipeline stages are priced in lockstep, each tick as long as its costliest action")
    if chip is None:
        notes.append(f"{report.device_kind} is not in the table of chips: no times")
    elif report.cpu_rates:
        notes.append("simulated devices share this host: rates were measured just now, with all of them busy")
    return notes


def _phases_note(phases: Sequence[tuple[int, float]]) -> str:
    """Note on first steps that send something else than those of which the plan is."""
    (end, _), (steps, later) = phases[-2:]
    begins = [0, *(begin for begin, _ in phases)]
    total = [(after - before) * size for before, (after, size) in zip(begins, phases)]
    first, mean = sum(total[:-1]) / end, sum(total) / steps
    text = f"between replicas a device sends {first / 1e6:.3g} MB in each of the first {end} steps in the mean, and"
    return f"{text} {later / 1e6:.3g} MB in later ones, of which this plan is; in that of all {mean / 1e6:.3g} MB"


def _exchange_note(sync: SyncConfig, report: CompileReport, exchange: Traffic | None) -> str:
    """Note on what replicas that agree loosely send, and on its time."""
    total, most, during, _ = report.exchange
    in_turns = during > 0
    what = f"in the exchanges of the fragments of {sync.strategy}" if in_turns else f"in an exchange of {sync.strategy}"
    text = f"{what} a device sends {total / 1e6:.3g} MB, every {sync.every} steps"
    per_step = f"{total / sync.every / 1e6:.3g} MB a step" + (f", at most {most / 1e6:.3g} MB in one" * in_turns)
    its = "their" if in_turns else "its"
    if exchange is None:
        return f"{text} ({per_step}); {its} time is not in that of the step"
    return f"{text} ({per_step}); `exchange` is the mean of a step, as a ring at the rate of the link"
