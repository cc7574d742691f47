"""Families of layouts that engineers know by name, and why the best of each lost a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.pipeline.schedules.shipped import SCHEDULES
from jaxtrain.planning.choices import LayoutChoice
from jaxtrain.planning.cost.estimate import Estimate, PricedCollective
from jaxtrain.planning.report.values import MEMORY, format_bytes, format_seconds
from jaxtrain.planning.result import Plan
from jaxtrain.sharding.axes import AXES
from jaxtrain.sharding.rules import CONTEXT, DATA_AXIS, PIPELINE_AXIS

TIE = 0.01  # relative differences below it count as equal
AXIS_NAMES = {
    "model": "tensor parallel", "fsdp": "FSDP", DATA_AXIS: "data parallel", CONTEXT: "context parallel",
    "expert": "expert parallel", PIPELINE_AXIS: "pipeline",
}  # fmt: skip


@dataclass(frozen=True)
class FamilyResult:
    """Best layout of a family, and why it is not the winner. `estimate` is None if the family has no legal layout."""

    family: str
    estimate: Estimate | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Converts the result for JSON."""
        estimate = self.estimate
        return {
            "family": self.family, "choice": str(estimate.choice) if estimate else None, "reason": self.reason,
            "estimate": estimate.as_dict() if estimate else None,
        }  # fmt: skip


def family_names(domain: int, devices: int, has_experts: bool) -> list[str]:
    """Lists the families for a number of devices in nodes or slices of `domain` devices."""
    tensor = [f"tensor parallel {word} {domain}" for word in ("inside", "across")[: 1 + (domain < devices)]]
    zero = ["ddp", "zero 1 over everything", "zero 2 over everything"]
    experts = ["expert parallel"] if has_experts else []
    schedules = [f"pipeline, {name}" for name in SCHEDULES]
    return [*zero, "fsdp over everything", "hsdp", *tensor, "context parallel", *experts, *schedules]


def families_of(choice: LayoutChoice, domain: int) -> Iterator[str]:
    """Yields the families of a choice; `domain` is the number of devices on the fast network."""
    axes = {axis for axis in AXES if choice.axis_sizes[axis] > 1}
    if axes == {DATA_AXIS}:
        yield "ddp" if choice.zero == 0 else f"zero {choice.zero} over everything"
    if axes == {"fsdp"}:
        yield "fsdp over everything"
    if axes == {DATA_AXIS, "fsdp"}:
        yield "hsdp"
    if "model" in axes and not axes & {PIPELINE_AXIS, CONTEXT, "expert"}:
        yield f"tensor parallel {'inside' if choice.size('model') <= domain else 'across'} {domain}"
    if CONTEXT in axes and PIPELINE_AXIS not in axes:
        yield "context parallel"
    if "expert" in axes and PIPELINE_AXIS not in axes:
        yield "expert parallel"
    if PIPELINE_AXIS in axes:
        yield f"pipeline, {choice.schedule}"


def why_estimate_is_worse(loser: Estimate, winner: Estimate, objective: str, is_assumed: bool = False) -> str:
    """Explains in a line with figures why an estimate loses to another.

    Args:
        loser: the worse one.
        winner: the better one.
        objective: as in `search`.
        is_assumed: the chip's figures are assumptions, so no seconds are given.
    """
    if loser.usable is not None and not loser.fits():
        return _does_not_fit(loser.needs, loser.usable, loser.memory)
    return _compare(loser, winner, objective, lambda: _estimate_cause(loser, winner, is_assumed))


def why_plan_is_worse(loser: Plan, winner: Plan, objective: str) -> str:
    """Explains why a compiled step loses to another; `objective` is as in `search`."""
    if loser.fits is False:
        if not loser.needs or loser.usable is None:
            return loser.reason
        return _does_not_fit(loser.needs, loser.usable, loser.memory)
    return _compare(loser, winner, objective, lambda: _plan_cause(loser, winner))


def _does_not_fit(needs: float, usable: float, memory: Mapping[str, float]) -> str:
    """`does not fit: 96.12 GB of 79.00 GB, 64.20 GB of them optimizer state`."""
    text = f"does not fit: {format_bytes(needs)} of {format_bytes(usable)}"
    kind = max(MEMORY, key=lambda kind: memory.get(kind, 0.0))
    return f"{text}, {format_bytes(memory[kind])} of them {MEMORY[kind]}" if memory.get(kind) else text


def _compare(loser: Estimate | Plan, winner: Estimate | Plan, objective: str, cause: Callable[[], str]) -> str:
    """Describes how much worse the loser is by the objective, and why."""
    if objective == "memory":
        more = {kind: loser.memory.get(kind, 0.0) - winner.memory.get(kind, 0.0) for kind in MEMORY}
        kind = max(more, key=lambda kind: more[kind])
        worse = f"{format_bytes(loser.needs)}, {format_bytes(more[kind])} more {MEMORY[kind]}"
        return _compare_ratio(loser.needs / winner.needs, ("smaller", "small"), worse)
    if not loser.step_seconds or not winner.step_seconds:
        return f"{format_bytes(loser.wire_bytes)} sent a step"
    ratio = loser.step_seconds / winner.step_seconds
    if objective == "cost" and loser.devices != winner.devices:
        ratio *= loser.devices / winner.devices
        return _compare_ratio(ratio, ("cheaper", "cheap"), f"{ratio:.2f}x the device-hours on {loser.devices} devices")
    slower = f"{ratio:.1f}x slower" if ratio >= 1.95 else f"{ratio - 1:.0%} slower"
    return _compare_ratio(ratio, ("faster", "fast"), f"{slower}: {cause()}")


def _compare_ratio(ratio: float, words: tuple[str, str], worse: str) -> str:
    """`worse`, or that the candidate ties, or that it is better than the winner but was only estimated."""
    if ratio < 1 - TIE:
        return f"{1 - ratio:.0%} {words[0]} by estimate, but not compiled"
    return worse if ratio >= 1 + TIE else f"as {words[1]} within {TIE:.0%}"


def _estimate_cause(loser: Estimate, winner: Estimate, is_assumed: bool) -> str:
    """Describes the largest part of a loser's extra time."""
    more = {kind: seconds - winner.parts.get(kind, 0.0) for kind, seconds in loser.parts.items()}
    more["bubble"] = loser.bubble_seconds - winner.bubble_seconds
    winner_waits, waits = _exposed_by_purpose(winner), _exposed_by_purpose(loser)
    for key, (seconds, _) in waits.items():
        more[key] = seconds - (winner_waits[key][0] if key in winner_waits else 0.0)
    worst = max(more, key=lambda kind: more[kind])
    seconds = "" if is_assumed else f"{format_seconds(more[worst])} "
    choice = loser.choice
    if worst in waits:
        row = waits[worst][1]
        axes = row.axes.split("+")
        name = "+".join(AXIS_NAMES.get(axis, axis) for axis in axes)
        crosses = " leaves the node," if "+" in row.network or row.network in ("InfiniBand", "DCN") else ","
        return f"{name} {choice.size(*axes)}{crosses} {seconds}more of waiting for {row.op} on {row.network}"
    texts = {
        "bubble": f"waiting for other stages, {loser.bubble_seconds / loser.step_seconds:.0%} of the step",
        "recompute": f"recomputation ({_remat_text(choice)})",
        "elementwise": f"reading and writing memory, {_memory_cause(choice)}",
        "launch": f"launching operations: {choice.microbatches} microbatches",
        "attention": "attention",
        "matmul": "matmuls: matrices are small, or read for few tokens",
    }
    return f"{seconds}more of {texts[worst]}"


def _remat_text(choice: LayoutChoice) -> str:
    remat = choice.remat if isinstance(choice.remat, str) else f"all but {', '.join(choice.remat)}"
    return f"remat {remat}" + ("; XLA recomputes if memory is tight" if choice.remat == "none" else "")


def _memory_cause(choice: LayoutChoice) -> str:
    if choice.size(PIPELINE_AXIS) > 1:
        return "partly buffers of pipeline stages"
    if choice.size("model") > 1:
        return "for activations that tensor parallelism gathers"
    several = choice.microbatches > 1
    return f"for weights and gradients {choice.microbatches} times a step" if several else "for unsharded weights"


def _exposed_by_purpose(estimate: Estimate) -> dict[str, tuple[float, PricedCollective]]:
    """Exposed seconds by purpose, with the longest row; gradients and embedding rows count as weights."""
    out: dict[str, tuple[float, PricedCollective]] = {}
    for row in estimate.traffic:
        key = "weights" if row.purpose in ("gradients", "once", "rows") else row.purpose
        seconds, longest = out.get(key, (0.0, row))
        out[key] = seconds + row.exposed, max(longest, row, key=lambda one: one.exposed)
    return out


def _plan_cause(loser: Plan, winner: Plan) -> str:
    """Describes the largest part of a loser's extra time."""

    def seconds(plan: Plan, key: str, *names: str) -> float:
        return sum(plan.seconds_by.get(key, {}).get(name, 0.0) for name in names)

    extra = {
        "recomputation": seconds(loser, "phase", "remat") - seconds(winner, "phase", "remat"),
        "reading and writing memory": seconds(loser, "kind", "elementwise", "copy")
        - seconds(winner, "kind", "elementwise", "copy"),
        "waiting for other stages": loser.bubble_seconds - winner.bubble_seconds,
    }
    exposed = {(row.axes, row.op): row.exposed for row in winner.traffic}
    for row in loser.traffic:
        name = f"waiting for {row.op} over {row.axes} on {row.network}"
        extra[name] = row.exposed - exposed.get((row.axes, row.op), 0.0)
    name = max(extra, key=lambda name: extra[name])
    return f"{name} takes {format_seconds(extra[name])} more"
