"""Values of a plan for reports: rows with names and units, and texts for unknown figures.

1 GB is 1e9 bytes; capacities are also given in GiB (2**30 bytes), as chips are sold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.planning.hardware import chips, targets
from jaxtrain.planning.hardware.calibration import calibration_of
from jaxtrain.planning.hardware.chips import GIB, Chip
from jaxtrain.planning.result import Advice, Plan, Traffic
from jaxtrain.sharding.axes import AXES

# Kinds of `Plan.memory` on the device, in the order in which they are stacked.
MEMORY = {
    "params": "parameters", "gradients": "gradients", "optimizer": "optimizer state", "sync": "synchronisation",
    "gathered": "gathered weights", "activations": "activations, temporaries", "workspace": "workspace of cuDNN",
    "batch": "batch",
}  # fmt: skip
KINDS = {
    "matmul": "matrix multiplications", "attention": "attention kernels", "elementwise": "elementwise",
    "kernel": "other kernels", "copy": "copies", "collective": "collectives, locally",
    "pages": "allocation of memory by the system",
}  # fmt: skip
PREFIXES = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


@dataclass(frozen=True)
class Unit:
    """Unit for all figures of a table: `name` is `factor` base units, shown with `digits` decimals."""

    name: str
    factor: float
    digits: int = 2

    def number(self, value: float | None) -> str:
        """Formats a figure without its unit: a dash for None, and `<0.01` instead of a rounded 0."""
        if value is None:
            return "-"
        text = f"{value / self.factor:,.{self.digits}f}"
        return f"<{10**-self.digits:.{self.digits}f}" if value > 0 and float(text.replace(",", "")) == 0 else text

    def __call__(self, value: float | None) -> str:
        return "unknown" if value is None else f"{self.number(value)} {self.name}"


def byte_unit(sizes: Iterable[float]) -> Unit:
    """GB, or MB or kB if the largest size is below a tenth of it."""
    largest = max(sizes, default=0.0)
    units = (Unit(name, factor) for name, factor in (("GB", 1e9), ("MB", 1e6)) if largest >= 0.1 * factor)
    return next(units, Unit("kB", 1e3))


def time_unit(seconds: Iterable[float]) -> Unit:
    """Seconds, or ms or µs if the longest is below one."""
    longest = max(seconds, default=0.0) or 1.0
    units = (Unit(name, factor) for name, factor in (("s", 1.0), ("ms", 1e-3)) if longest >= factor)
    return next(units, Unit("µs", 1e-6))  # noqa: RUF001


def format_seconds(seconds: float | None) -> str:
    """`1.23 s`, in a suitable unit."""
    return "unknown" if seconds is None else time_unit([seconds])(seconds)


def format_days(days: float) -> str:
    """`12.34 days`, or hours, minutes or less if shorter."""
    for name, length in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= length:
            return f"{days / length:,.2f} {name}"
    return format_seconds(days * 86400)


def format_bytes(size: float | None) -> str:
    """`1.23 GB`, in a suitable unit."""
    return "unknown" if size is None else byte_unit([size])(size)


def format_si(value: float | None, unit: str) -> str:
    """`4.53 PFLOP`: three digits and an SI prefix."""
    if value is None:
        return "unknown"
    prefix, factor = next((one for one in PREFIXES if abs(value) >= one[1]), ("", 1.0))
    return f"{value / factor:.3g} {prefix}{unit}"


def format_count(number: float) -> str:
    """`10.5B`: three digits, as tokens and parameters are counted."""
    letter, factor = next((one for one in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if number >= one[1]), ("", 1.0))
    return f"{number / factor:.3g}{letter}" if letter else f"{number:,.0f}"


def format_percent(share: float | None) -> str:
    """`43.2%`."""
    return "unknown" if share is None else f"{share:.1%}"


def chip_of(plan: Plan) -> Chip | None:
    """Chip of a plan's target, or of JAX's devices; None if it is not in the table."""
    return targets.parse(plan.target).chip or chips.chip_of_device(plan.device)


class PlanFact(NamedTuple):
    """A figure of a plan with its name and a note."""

    name: str
    value: str
    note: str = ""


def verdict(plan: Plan) -> tuple[str, str]:
    """(`fits`, `does not fit`, `not compiled` or `fit unknown`; the figures)."""
    if not plan.compiled:
        return "not compiled", plan.reason
    if plan.fits is None:
        return "fit unknown", f"needs {format_bytes(plan.needs)}; the memory of {plan.device} is unknown"
    if not plan.fits:
        has_figures = plan.memory or not plan.needs  # else the reason is the compiler's, without figures
        needs = f"needs {format_bytes(plan.needs)} of {format_bytes(plan.usable)} usable; "
        return "does not fit", ("" if has_figures else needs) + plan.reason
    assert plan.usable is not None
    return "fits", f"{format_bytes(plan.needs)} of {format_bytes(plan.usable)} usable ({plan.needs / plan.usable:.0%})"


def pods_text(plan: Plan) -> str:
    """Names the smaller pods that were compiled instead; empty if none."""
    if not plan.pods:
        return ""
    pods = "a smaller pod" if len(plan.pods) == 1 else "two smaller pods"
    return f"extrapolated from {pods}: {' and '.join(plan.pods)}"


def why_no_time(plan: Plan) -> str:
    """Explains why the step time is unknown; empty if it is known."""
    if plan.step_seconds is not None:
        return ""
    if not plan.can_run:
        return "the step does not fit" if plan.compiled else "the step was not compiled"
    if plan.compute_seconds is None:
        return f"{plan.device} is not in the table of chips"
    return f"the network between {plan.devices} x {plan.device} is unknown"


def headline(plan: Plan) -> list[PlanFact]:
    """Step time, throughput, utilization, and cost of the run."""
    step_note = why_no_time(plan) or f"{plan.tokens:,} tokens a step{' of an island' if plan.islands else ''}"
    run = f"{plan.steps:,} steps, {format_count(plan.steps * plan.tokens)} tokens"
    facts = [PlanFact("step time", format_seconds(plan.step_seconds), step_note)]
    rate, hours = plan.tokens_per_second, plan.device_hours or 0.0
    if rate is None:
        return [*facts, PlanFact("run", "unknown", run)]
    mfu_note = "" if plan.hfu is None else f"{plan.hfu:.1%} with recomputation (HFU)"
    if plan.mfu is None:
        mfu_note = "the FLOPs of this model are unknown"
    together = []
    if plan.islands and plan.islands.own.tokens_per_second is not None:
        count, own = plan.islands.count, plan.islands.own
        together = [PlanFact("islands", f"{own.tokens_per_second:,.0f}", f"tokens/s of {count} islands together")]
    return [
        *facts,
        PlanFact("tokens/s", f"{rate:,.0f}", f"{rate / max(1, plan.devices):,.0f} a device"),
        *together,
        PlanFact("MFU", format_percent(plan.mfu), mfu_note),
        PlanFact("run", format_days(plan.days or 0.0), f"{hours:,.{0 if hours >= 10 else 2}f} device-hours for {run}"),
    ]


def memory_rows(plan: Plan) -> list[tuple[str, str, int]]:
    """(kind, name, bytes) on a device, in the order of MEMORY, without empty ones."""
    return [(kind, name, size) for kind, name in MEMORY.items() if (size := plan.memory.get(kind, 0))]


def chip_memory(plan: Plan) -> float:
    """Bytes of memory of the chip; 0 if unknown, or if its maker states less than the compiler."""
    chip = chip_of(plan)
    size = chip.memory.value if chip else 0.0
    return size if size >= (plan.usable or 0) else 0.0


def memory_note(plan: Plan) -> str:
    """Describes the memory of a chip and its usable part, in GB and GiB."""
    if plan.usable is None:
        return "the memory of the device is unknown"
    size = chip_memory(plan)
    total = f", of {size / 1e9:,.2f} GB ({size / GIB:,.1f} GiB)" if size else ""
    return f"usable: {plan.usable / 1e9:,.2f} GB ({plan.usable / GIB:,.1f} GiB){total}"


@dataclass(frozen=True)
class TimePart:
    """Part of a step's time: `group` is `compute`, `communication` or `bubble`."""

    group: str
    name: str
    seconds: float


def time_parts(plan: Plan) -> list[TimePart]:
    """Parts of a step's time: computation by kind, exposed communication by axis, and the bubble."""
    kinds = sorted(plan.seconds_by.get("kind", {}).items(), key=lambda item: -item[1])
    parts = [TimePart("compute", KINDS.get(kind, kind), seconds) for kind, seconds in kinds]
    waits: dict[str, float] = {}
    for row in plan.traffic:
        waits[row.axes] = waits.get(row.axes, 0.0) + row.exposed
    longest = sorted(waits.items(), key=lambda item: -item[1])
    parts += [TimePart("communication", f"waiting for {_axes_text(axes)}", seconds) for axes, seconds in longest]
    parts.append(TimePart("bubble", "pipeline bubble", plan.bubble_seconds))
    return [part for part in parts if part.seconds > 0]


def _axes_text(axes: str) -> str:
    """Names axes of the mesh as such, since the axis `data` is not the data; `host` and `islands` as they are."""
    names = axes.removeprefix("part of ").split("+")
    if not {*names} <= {*AXES}:
        return axes
    part = "part of " if axes.startswith("part of ") else ""
    return f"{part}{'axis' if len(names) == 1 else 'axes'} {'+'.join(names)}"


def flops_facts(plan: Plan) -> list[PlanFact]:
    """FLOPs of a step on a device."""
    unknown = "unknown for this model"
    hardware_note = unknown
    if plan.flops_model and plan.flops_hardware:
        more = plan.flops_hardware / plan.flops_model - 1
        hardware_note = f"{more:+.1%} by recomputation (remat)" if more > 0 else "no recomputation"
    return [
        PlanFact("model", format_si(plan.flops_model, "FLOP"), "" if plan.flops_model else unknown),
        PlanFact("hardware", format_si(plan.flops_hardware, "FLOP"), hardware_note),
        PlanFact("compiled", format_si(plan.flops_compiled, "FLOP"), "counted in the compiled program"),
    ]


def hidden_share(row: Traffic) -> str:
    """Share of a row's seconds that overlaps with computation."""
    return "-" if not row.seconds or row.hidden is None else f"{row.hidden / row.seconds:.0%}"


def traffic_total(plan: Plan) -> Traffic:
    """Sum of a plan's traffic; seconds are None if the network is unknown."""
    rows = plan.traffic
    seconds = hidden = None
    if plan.exposed_seconds is not None:
        seconds = sum(row.seconds or 0.0 for row in rows)
        hidden = seconds - plan.exposed_seconds
    return Traffic("total", "", "", sum(row.count for row in rows), plan.wire_bytes, seconds, hidden)


def traffic_cells(row: Traffic, size: Unit, time: Unit) -> tuple[str, ...]:
    """Axes, network, operation, count, bytes, seconds, hidden share and exposed seconds of a row."""
    exposed = None if row.seconds is None else row.exposed
    return (
        row.axes, row.network, row.op, f"{row.count:,}", size.number(row.bytes), time.number(row.seconds),
        hidden_share(row), time.number(exposed),
    )  # fmt: skip


def gain_text(advice: Advice) -> str:
    """Estimated gain of a change."""
    return f"{advice.gain:+.0%} tokens/s" if advice.gain else "less memory"


def assumptions(plan: Plan) -> list[str]:
    """Assumptions of a plan: its notes, the chip's figures, and the fractions of them that programs reach."""
    chip = chip_of(plan)
    if chip is None or not plan.can_run:
        return list(plan.notes)
    shares = calibration_of(chips.chip_kind(chip))
    peak, bandwidth = format_si(chip.flops("bf16"), "FLOP/s"), format_si(float(chip.bandwidth), "B/s")
    figures = [f"{peak} in bf16", f"memory {bandwidth}"]
    reached = [f"matmuls {shares.matmul:.0%}", f"attention {shares.attention:.0%}", f"memory {shares.memory:.0%}"]
    if isinstance(chip.inside, chips.Torus):
        figures.append(f"{chip.inside.name} {format_si(float(chip.inside.link), 'B/s')} one way per link")
    elif isinstance(chip.inside, chips.Switch):
        figures.append(f"{chip.inside.name} {format_si(float(chip.inside.bandwidth), 'B/s')} one way")
    reached += [f"{chip.inside.name} {shares.inside:.0%}"] if chip.inside else []
    links = [(chip.outside, shares.outside)] if any(plan.crosses.values()) else []
    links += [(chip.host, shares.host)] if plan.memory.get("host") else []
    for link, share in links:
        if link is not None:
            figures.append(f"{link.name} {format_si(float(link.bandwidth), 'B/s')} one way")
            reached.append(f"{link.name} {share:.0%}")
    return [f"a device has {', '.join(figures)}; programs reach of these: {', '.join(reached)}", *plan.notes]
