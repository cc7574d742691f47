"""Assessment of a compiled step: reads, counts and prices it, and returns a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.hlo import collectives, parse
from jaxtrain.hlo.parse import Instruction, Module
from jaxtrain.models.flops import decoder_flops, mean_attended
from jaxtrain.models.spec import has_token_rows, is_decoder
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.planning import advice
from jaxtrain.planning.compile import Report
from jaxtrain.planning.cost import memory, pipeline_bubble, transfers
from jaxtrain.planning.cost.roofline import Cost, Operation, analyse
from jaxtrain.planning.hardware import calibration, chips, network, targets
from jaxtrain.planning.hardware.calibration import Achieved, Calibration
from jaxtrain.planning.hardware.chips import Chip, Figure
from jaxtrain.planning.result import Plan

LARGEST = 8  # tensors and buffers that a plan names
HOST = 5  # memory space
KEPT = 2**25  # bytes of the largest block that glibc's malloc keeps when it is freed (DEFAULT_MMAP_THRESHOLD_MAX)
KEYS = ("phase", "part", "kind")  # of operations


@dataclass(frozen=True)
class Hardware:
    """The chip of a report, None of one that nobody knows, and the shares of its figures that programs achieve."""

    chip: Chip | None
    shares: Calibration
    torus: tuple[int, ...] = ()

    @classmethod
    def of(cls, report: Report) -> Hardware:
        """Returns the hardware of a target, of the devices that JAX found, or of a CPU as measured."""
        where = targets.parse(report.target)
        if report.measured:
            return cls(
                _cpu(report.measured, len(report.places)),
                replace(calibration.MEASURED, launch=report.measured["launch"]),
            )
        chip = where.chip or chips.of_device(report.device_kind)
        return cls(chip, calibration.of_kind(chips.kind_of(chip)), where.shape if where.platform == "tpu" else ())


def _cpu(measured: Mapping[str, float], devices: int) -> Chip:
    figures = {key: Figure(value, "measured on this host") for key, value in measured.items()}
    unknown = Figure(0, "unknown")
    network = None if "copy" not in figures else chips.SharedMemory(
        figures["copy"], figures["reduce"], figures["meeting"], devices
    )  # fmt: skip
    peak = {"bf16": figures["flops"], "fp32": figures["flops"]}
    return Chip("cpu", peak, unknown, unknown, figures["memory"], network)


def assess(config: Config, report: Report) -> Plan:
    """The plan that a compiled step amounts to."""
    hardware, module = Hardware.of(report), parse.parse(report.text)
    schedule = pipeline_bubble.table(config, report.sizes["pipeline"])
    cost = _with_pages(_cost(config, module, hardware, schedule), report)
    chip = hardware.chip
    fabric = network.Fabric(chip, hardware.shares, hardware.torus, report.places)
    rows = transfers.rows(module, report, cost, fabric, config.mesh.dcn, schedule)
    # Simulated stages that wait leave the cores to the others.
    waiting = pipeline_bubble.bubble(schedule, cost).seconds if schedule and not report.measured else 0.0
    computing = cost.seconds if chip else None
    known = computing is not None and all(row.seconds is not None for row in rows)
    exposed = sum(row.exposed for row in rows) if known else None
    step = computing + exposed + waiting if computing is not None and exposed is not None else None
    flops = _flops(config, report)
    plan = Plan(
        report.target, report.device_kind, len(report.places), report.layout, report.sizes,
        crosses=network.crosses(report.places, report.sizes), **_memory(report, chip, memory.workspace(module)),
        buffers=tuple(buffers(module)), tensors=tuple(report.tensors[:LARGEST]), traffic=tuple(rows),
        flops_model=flops[0], flops_hardware=flops[1], flops_compiled=cost.flops(),
        compute_seconds=computing, exposed_seconds=exposed, bubble_seconds=waiting if chip else 0.0,
        seconds_by={key: cost.by(key) for key in KEYS} if chip else {},
        flops_by={key: cost.by(key, value="flops") for key in KEYS},
        bytes_by={key: cost.by(key, value="bytes") for key in KEYS},
        step_seconds=step, mfu=_rate(flops[0], step, chip), hfu=_rate(flops[1], step, chip),
        tokens=tokens_of(config), steps=config.steps,
        notes=tuple(_notes(report, hardware, cost, schedule)), compile_seconds=report.seconds,
    )  # fmt: skip
    return replace(plan, limit=advice.limit(plan), advice=tuple(advice.changes(config, plan)))


def tokens_of(config: Config) -> int:
    """Tokens, or rows of a user's own data, of a global batch."""
    return config.data.global_batch * (config.data.sequence if has_token_rows(config.model, config.data) else 1)


def _rate(flops: float | None, step: float | None, chip: Chip | None) -> float | None:
    """Share of the bfloat16 peak, as runs report it."""
    return flops / step / chip.flops("bf16") if flops and step and chip else None


def _cost(config: Config, module: Module, hardware: Hardware, schedule: Table | None) -> Cost:
    def choose(conditional: Instruction, seconds: Sequence[float]) -> Sequence[float] | None:
        if schedule and (weights := pipeline_bubble.choose(schedule, conditional)):
            return weights
        if "attention_cudnn" in conditional.scope:  # few enough documents in a row for the packed kernel, the fast one
            return [float(at == seconds.index(min(seconds))) for at in range(len(seconds))]
        return None

    rates = Achieved(hardware.chip, hardware.shares) if hardware.chip else None
    sequence = config.data.sequence
    return analyse(module, rates, choose=choose, visible=mean_attended(config.model, sequence) / sequence)


def _with_pages(cost: Cost, report: Report) -> Cost:
    """Adds the cost of temporaries that malloc returns to the system after every step on simulated devices."""
    if not report.measured or report.memory.temporaries <= KEPT:
        return cost
    seconds = report.memory.temporaries / report.measured["pages"]
    return replace(cost, operations=[*cost.operations, Operation("pages", "pages", "pages", seconds=seconds)])


def _flops(config: Config, report: Report) -> tuple[float | None, float | None]:
    """FLOPs of a step on one device: of the model, and of the hardware."""
    devices = max(1, len(report.places))
    tokens = tokens_of(config) / devices
    if not is_decoder(config.model):
        return (report.user_flops / devices if report.user_flops else None), None
    vocab = report.vocab
    if vocab is None:
        return None, None
    found = decoder_flops(config.model, vocab, config.data.sequence, config.step.kept, report.head_again)
    return found.model * tokens, None if found.hardware is None else found.hardware * tokens


def _memory(report: Report, chip: Chip | None, workspace: int) -> dict[str, Any]:
    """`fits`, `reason`, `needs`, `usable` and `memory` of a plan. `workspace` comes to what the compiler says."""
    planned, held, state = report.memory, report.held, report.state
    is_tpu, usable = _is_tpu(report), int(chip.usable.value) if chip and chip.usable.value else None
    compiled = planned.total
    if is_tpu and usable:  # its temporaries count holes between buffers; where it compiles, it fits
        compiled = min(compiled, usable) if planned.peak_is_the_hosts else planned.peak
    temporaries = max(0, compiled - planned.arguments - max(0, planned.outputs - planned.aliased))
    gradients = min(temporaries, held.get("gradients", 0))
    gathered = min(temporaries - gradients, held.get("weights", 0) + held.get("gathered", 0))
    kinds = {
        "params": state.get("params", 0),
        "optimizer": sum(size for part, size in state.items() if part != "params"),
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


def _is_tpu(report: Report) -> bool:
    return targets.parse(report.target).platform == "tpu"


def buffers(module: Module, count: int = LARGEST) -> list[tuple[str, str, int]]:
    """The largest arrays that a program makes on the device, (shape, scope, bytes), each shape and scope once."""
    found: dict[tuple[str, str], int] = {}
    passed = ("parameter", "get-tuple-element", "tuple", "while", "bitcast", "conditional", "copy-done", "constant")
    for name in _run(module, module.entry, set()):
        for one in module.computations[name].values():
            if one.op in passed or one.op.endswith("-done"):
                continue
            for leaf in one.result.leaves:
                if leaf.space != HOST:
                    shape = f"{leaf.dtype}[{','.join(map(str, leaf.dims))}]"
                    found[shape, collectives.short(one.scope)] = leaf.bytes
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return [(shape, scope, size) for (shape, scope), size in ordered[:count]]


def _run(module: Module, name: str, seen: set[str]) -> set[str]:
    """Computations that run, not inside of fusions."""
    if name not in seen and name in module.computations:
        seen.add(name)
        for one in module.computations[name].values():
            inside = [*one.branches, *(one.called if one.op in ("call", "async-start") else [])]
            for part in (*inside, *([one.attribute("body")] if one.op == "while" else [])):
                _run(module, part, seen)
    return seen


def _notes(report: Report, hardware: Hardware, cost: Cost, schedule: Table | None) -> list[str]:
    out = []
    if unknown := cost.unknown:
        out.append(f"kernels whose FLOPs nothing tells are priced by their memory traffic: {', '.join(unknown[:4])}")
    if any(one.unknown for one in cost.operations):
        out.append("a loop of unknown length counts once")
    if _is_tpu(report) and report.memory.host and report.memory.peak_is_the_hosts:
        out.append("the host keeps more than a device does, whose memory libtpu then does not tell: it is at most this")
    if schedule and not report.measured:
        out.append("pipeline stages are priced in lockstep, each tick as long as its costliest action")
    if hardware.chip is None:
        out.append(f"nothing is known of {report.device_kind}: no times")
    elif report.measured:
        out.append("simulated devices share this host: rates are what all of them achieve at once, measured just now")
    return out
