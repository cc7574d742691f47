"""Values of a plan for reports: rows with names and units, and words for unknown figures.

No JAX. 1 GB is 1e9 bytes everywhere; capacities are given in GiB (2**30 bytes) too, as chips are sold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtrain.planning.hardware import calibration, chips, targets
from jaxtrain.planning.hardware.chips import Chip
from jaxtrain.planning.result import Advice, Plan, Traffic

GIB = 2**30
# Kinds of `Plan.memory` on the device, in the order in which they are stacked; `host` is not the device's.
MEMORY = {
    "params": "parameters", "gradients": "gradients", "optimizer": "optimizer state", "gathered": "gathered weights",
    "activations": "activations, temporaries", "workspace": "workspace of cuDNN", "batch": "batch",
}  # fmt: skip
KINDS = {
    "matmul": "matrix multiplications", "attention": "attention kernels", "elementwise": "elementwise",
    "kernel": "other kernels", "copy": "copies", "collective": "collectives, locally",
    "pages": "memory that the system hands out",
}  # fmt: skip
PREFIXES = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


@dataclass(frozen=True)
class Unit:
    """A unit for all figures of a table: `name` of so many base units (`factor`), shown with `digits` decimals."""

    name: str
    factor: float
    digits: int = 2

    def number(self, value: float | None) -> str:
        """The figure without its unit; a dash for None, and never a zero for what is not zero."""
        if value is None:
            return "-"
        shown = f"{value / self.factor:,.{self.digits}f}"
        return f"<{10**-self.digits:.{self.digits}f}" if value > 0 and float(shown.replace(",", "")) == 0 else shown

    def __call__(self, value: float | None) -> str:
        return "unknown" if value is None else f"{self.number(value)} {self.name}"


def byte_scale(sizes: Iterable[float]) -> Unit:
    """GB, or MB or kB where the largest is smaller than a tenth of one."""
    largest = max(sizes, default=0.0)
    return next((Unit(name, factor) for name, factor in (("GB", 1e9), ("MB", 1e6)) if largest >= 0.1 * factor),
                Unit("kB", 1e3))  # fmt: skip


def time_scale(seconds: Iterable[float]) -> Unit:
    """Seconds, or ms or µs where the longest is shorter than one."""
    longest = max(seconds, default=0.0) or 1.0
    return next((Unit(name, factor) for name, factor in (("s", 1.0), ("ms", 1e-3)) if longest >= factor),
                Unit("µs", 1e-6))  # fmt: skip


def duration(seconds: float | None) -> str:
    """`1.23 s`, in the unit that suits it."""
    return "unknown" if seconds is None else time_scale([seconds])(seconds)


def span(days: float) -> str:
    """`12.34 days`, or hours, minutes or less where it is short."""
    for name, length in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= length:
            return f"{days / length:,.2f} {name}"
    return duration(days * 86400)


def volume(size: float | None) -> str:
    """`1.23 GB`, in the unit that suits it."""
    return "unknown" if size is None else byte_scale([size])(size)


def prefixed(value: float | None, unit: str) -> str:
    """`4.53 PFLOP`: three digits and an SI prefix."""
    if value is None:
        return "unknown"
    prefix, factor = next((one for one in PREFIXES if abs(value) >= one[1]), ("", 1.0))
    return f"{value / factor:.3g} {prefix}{unit}"


def count(number: float) -> str:
    """`10.5B`: three digits, as tokens and parameters are counted."""
    letter, factor = next((one for one in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if number >= one[1]), ("", 1.0))
    return f"{number / factor:.3g}{letter}" if letter else f"{number:,.0f}"


def percent(share: float | None) -> str:
    """`43.2%`."""
    return "unknown" if share is None else f"{share:.1%}"


def chip_of(plan: Plan) -> Chip | None:
    """The chip of a plan's target, or of what JAX found; None of one that is not in the table."""
    return targets.parse(plan.target).chip or chips.of_device(plan.device)


@dataclass(frozen=True)
class Fact:
    """A line of the headline: what, how much, and what else there is to say of it."""

    name: str
    value: str
    note: str = ""


def verdict(plan: Plan) -> tuple[str, str]:
    """(`fits`, `does not fit`, `not compiled` or `fit unknown`; the figures)."""
    if not plan.compiled:
        return "not compiled", plan.reason
    if plan.fits is None:
        return "fit unknown", f"needs {volume(plan.needs)}; the memory of {plan.device} is not known"
    if not plan.fits:
        told = plan.memory or not plan.needs  # else the reason is the compiler's, without figures
        figures = "" if told else f"needs {volume(plan.needs)} of {volume(plan.usable)} usable; "
        return "does not fit", figures + plan.reason
    assert plan.usable is not None
    return "fits", f"{volume(plan.needs)} of {volume(plan.usable)} usable ({plan.needs / plan.usable:.0%})"


def origin(plan: Plan) -> str:
    """Describes what was compiled in place of a cluster that is too large to compile; else empty."""
    if not plan.pods:
        return ""
    which = "a smaller pod" if len(plan.pods) == 1 else "two smaller pods"
    return f"extrapolated from {which}: {' and '.join(plan.pods)}"


def why_no_time(plan: Plan) -> str:
    """Explains why no step time is known; empty if it is."""
    if plan.step_seconds is not None:
        return ""
    if not plan.can_run:
        return "the step does not fit" if plan.compiled else "the step was not compiled"
    if plan.compute_seconds is None:
        return f"nothing is known of {plan.device}"
    return f"nothing is known of the network between {plan.devices} x {plan.device}"


def headline(plan: Plan) -> list[Fact]:
    """Step time, throughput, utilization and the cost of the whole run."""
    why = why_no_time(plan)
    rate, no_flops = plan.tokens_per_second, "nobody counts the FLOPs of this model"
    work = f"{plan.steps:,} steps, {count(plan.steps * plan.tokens)} tokens"
    facts = [Fact("step time", duration(plan.step_seconds), why or f"{plan.tokens:,} tokens a step")]
    if rate is None:
        return [*facts, Fact("run", "unknown", work)]
    hours = plan.device_hours or 0.0
    hardware = "" if plan.hfu is None else f"{plan.hfu:.1%} with what remat computes again (HFU)"
    return [
        *facts,
        Fact("tokens/s", f"{rate:,.0f}", f"{rate / max(1, plan.devices):,.0f} a device"),
        Fact("MFU", percent(plan.mfu), no_flops if plan.mfu is None else hardware),
        Fact("run", span(plan.days or 0.0), f"{hours:,.{0 if hours >= 10 else 2}f} device-hours for {work}"),
    ]


def memory(plan: Plan) -> list[tuple[str, str, int]]:
    """(kind, name, bytes) of a device, in the order of MEMORY; what is empty is left out."""
    return [(kind, name, size) for kind, name in MEMORY.items() if (size := plan.memory.get(kind, 0))]


def installed(plan: Plan) -> float:
    """Bytes of memory of the chip; 0 where that is not known, or where its maker says less than its compiler."""
    chip = chip_of(plan)
    size = chip.memory.value if chip else 0.0
    return size if size >= (plan.usable or 0) else 0.0


def capacity(plan: Plan) -> str:
    """Describes the memory of a chip and the part that a program may take, in GB and in the GiB in which it is sold."""
    if plan.usable is None:
        return "what the device has is unknown"
    size = installed(plan)
    has = f", of {size / 1e9:,.2f} GB ({size / GIB:,.1f} GiB)" if size else ""
    return f"usable: {plan.usable / 1e9:,.2f} GB ({plan.usable / GIB:,.1f} GiB){has}"


@dataclass(frozen=True)
class TimePart:
    """Seconds of a step: `group` is `compute`, `communication` or `bubble`; `key` tells parts of a group apart."""

    group: str
    key: str
    name: str
    seconds: float


def times(plan: Plan) -> list[TimePart]:
    """Returns the parts of a step's time: computing by kind, waiting for communication by axis, and the bubble."""
    kinds = sorted(plan.seconds_by.get("kind", {}).items(), key=lambda item: -item[1])
    parts = [TimePart("compute", kind, KINDS.get(kind, kind), seconds) for kind, seconds in kinds]
    waits: dict[str, float] = {}
    for row in plan.traffic:
        waits[row.axes] = waits.get(row.axes, 0.0) + row.exposed
    longest = sorted(waits.items(), key=lambda item: -item[1])
    parts += [TimePart("communication", axes, f"waiting for {axes}", seconds) for axes, seconds in longest]
    parts.append(TimePart("bubble", "bubble", "pipeline bubble", plan.bubble_seconds))
    return [part for part in parts if part.seconds > 0]


def flops(plan: Plan) -> list[Fact]:
    """FLOPs of a step on a device."""
    again = ""
    if plan.flops_model and plan.flops_hardware:
        more = plan.flops_hardware / plan.flops_model - 1
        again = f"{more:+.1%}: what remat computes again" if more > 0 else "nothing is computed again"
    unknown = "nobody counts them for this model"
    return [
        Fact("model", prefixed(plan.flops_model, "FLOP"), "" if plan.flops_model else unknown),
        Fact("hardware", prefixed(plan.flops_hardware, "FLOP"), again if plan.flops_hardware else unknown),
        Fact("compiled", prefixed(plan.flops_compiled, "FLOP"), "counted in the compiled program"),
    ]


def hidden(row: Traffic) -> str:
    """Share of a row's seconds that passes while the device computes."""
    return "-" if not row.seconds or row.hidden is None else f"{row.hidden / row.seconds:.0%}"


def gain(advice: Advice) -> str:
    """Describes the predicted gain of a change."""
    return f"{advice.gain:+.0%} tokens/s" if advice.gain else "less memory"


def assumptions(plan: Plan) -> list[str]:
    """Lists the assumptions of a plan: its own notes, the chip's figures, and how much of them programs achieve."""
    chip = chip_of(plan)
    if chip is None or not plan.can_run:
        return list(plan.notes)
    figures = [f"{prefixed(chip.flops('bf16'), 'FLOP/s')} in bf16", f"memory {prefixed(float(chip.bandwidth), 'B/s')}"]
    shares = calibration.of_kind(chips.kind_of(chip))
    reached = [f"matmuls {shares.matmul:.0%}", f"attention {shares.attention:.0%}", f"memory {shares.memory:.0%}"]
    if isinstance(chip.inside, chips.Torus):
        figures.append(f"{chip.inside.name} {prefixed(float(chip.inside.link), 'B/s')} a link and way")
    elif isinstance(chip.inside, chips.Switch):
        figures.append(f"{chip.inside.name} {prefixed(float(chip.inside.bandwidth), 'B/s')} one way")
    reached += [f"{chip.inside.name} {shares.inside:.0%}"] if chip.inside else []
    used = [(chip.outside, shares.outside)] if any(plan.crosses.values()) else []
    used += [(chip.host, shares.host)] if plan.memory.get("host") else []
    for way, share in used:
        if way is not None:
            figures.append(f"{way.name} {prefixed(float(way.bandwidth), 'B/s')} one way")
            reached.append(f"{way.name} {share:.0%}")
    return [f"a device has {', '.join(figures)}; programs achieve of these: {', '.join(reached)}", *plan.notes]
