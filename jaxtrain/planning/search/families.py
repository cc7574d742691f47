"""Kinds of layouts that people know, the best of each, and why it lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.pipeline.schedules.shipped import SCHEDULES
from jaxtrain.planning.choices import Choice
from jaxtrain.planning.cost.estimate import Estimate, Sent
from jaxtrain.planning.report.values import MEMORY, duration, volume
from jaxtrain.planning.result import Plan
from jaxtrain.sharding.axes import AXES
from jaxtrain.sharding.rules import CONTEXT, DATA_AXIS, PIPELINE_AXIS

Side = Estimate | Plan
SAME = 0.01  # what differs by less is called the same
WORDS = {
    "model": "tensor parallel", "fsdp": "FSDP", DATA_AXIS: "data parallel", CONTEXT: "context parallel",
    "expert": "expert parallel", PIPELINE_AXIS: "pipeline",
}  # fmt: skip


@dataclass(frozen=True)
class Loser:
    """The best of a family, and why it is not the winner. `estimate` is None where no layout of it is legal."""

    family: str
    estimate: Estimate | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the family for JSON."""
        known = self.estimate
        return {
            "family": self.family, "choice": str(known.choice) if known else None, "reason": self.reason,
            "estimate": known.as_dict() if known else None,
        }  # fmt: skip


def names(inside: int, devices: int, has_experts: bool) -> list[str]:
    """Returns the families for a number of devices in nodes of `inside`."""
    experts = ["expert parallel"] if has_experts else []
    tensor = [f"tensor parallel {word} {inside}" for word in ("inside", "across")[: 1 + (inside < devices)]]
    zeros = ["ddp", "zero 1 over everything", "zero 2 over everything", "zero 3 over everything"]
    schedules = [f"pipeline, {name}" for name in SCHEDULES]
    return [*zeros, "fsdp over everything", "hsdp", *tensor, "context parallel", *experts, *schedules]


def families(choice: Choice, inside: int) -> Iterator[str]:
    """The families that a choice belongs to.

    Args:
        inside: devices that the fast network joins; of a family of tensor parallelism, `model` is compared with it.
    """
    axes = {axis for axis in AXES if choice.by_axis[axis] > 1}
    if axes == {DATA_AXIS}:
        yield "ddp" if choice.zero == 0 else f"zero {choice.zero} over everything"
    if axes == {"fsdp"}:
        yield "fsdp over everything"
    if axes == {DATA_AXIS, "fsdp"}:
        yield "hsdp"
    if "model" in axes and not axes & {PIPELINE_AXIS, CONTEXT, "expert"}:
        yield f"tensor parallel {'inside' if choice.size('model') <= inside else 'across'} {inside}"
    if CONTEXT in axes and PIPELINE_AXIS not in axes:
        yield "context parallel"
    if "expert" in axes and PIPELINE_AXIS not in axes:
        yield "expert parallel"
    if PIPELINE_AXIS in axes:
        yield f"pipeline, {choice.schedule}"


def too_large(needs: float, usable: float, memory: Mapping[str, float]) -> str:
    """`does not fit: 96.12 GB of 79.00 GB, 64.20 GB of them optimizer state`."""
    text = f"does not fit: {volume(needs)} of {volume(usable)}"
    kind = max(MEMORY, key=lambda kind: memory.get(kind, 0.0))
    return f"{text}, {volume(memory[kind])} of them {MEMORY[kind]}" if memory.get(kind) else text


def against(loser: Estimate, winner: Estimate, objective: str, assumed: bool = False) -> str:
    """Explains why one estimate loses to another, in a line with its figures.

    Args:
        objective: as `search` takes it.
        assumed: seconds mean nothing by themselves.
    """
    if loser.usable is not None and not loser.fits():
        return too_large(loser.needs, loser.usable, loser.memory)
    return _compared(loser, winner, objective, lambda: _cause(loser, winner, assumed))


def of_plans(loser: Plan, winner: Plan, objective: str) -> str:
    """Explains why a compiled step loses to another; `objective` as `search` takes it."""
    if loser.fits is False:
        if not loser.needs or loser.usable is None:
            return loser.reason
        return too_large(loser.needs, loser.usable, loser.memory)
    return _compared(loser, winner, objective, lambda: _plan_cause(loser, winner))


def _compared(loser: Side, winner: Side, objective: str, cause: Callable[[], str]) -> str:
    """Describes how much worse one is by the objective, and why."""
    if objective == "memory":
        more = {kind: loser.memory.get(kind, 0.0) - winner.memory.get(kind, 0.0) for kind in MEMORY}
        kind = max(more, key=lambda kind: more[kind])
        worse = f"{volume(loser.needs)}, {volume(more[kind])} more {MEMORY[kind]}"
        return _within(loser.needs / winner.needs, ("smaller", "small"), worse)
    if not loser.step_seconds or not winner.step_seconds:
        return f"{volume(loser.wire_bytes)} sent a step"
    ratio = loser.step_seconds / winner.step_seconds
    if objective == "cost" and loser.devices != winner.devices:
        ratio *= loser.devices / winner.devices
        return _within(ratio, ("cheaper", "cheap"), f"{ratio:.2f}x the device-hours on {loser.devices} devices")
    slower = f"{ratio:.1f}x slower" if ratio >= 1.95 else f"{ratio - 1:.0%} slower"
    return _within(ratio, ("faster", "fast"), f"{slower}: {cause()}")


def _within(ratio: float, words: tuple[str, str], worse: str) -> str:
    """Explains that a candidate better than the first of a ranking is so by formula alone."""
    if ratio < 1 - SAME:
        return f"{1 - ratio:.0%} {words[0]} by formula, but not compiled"
    return worse if ratio >= 1 + SAME else f"as {words[1]} within {SAME:.0%}"


def _cause(loser: Estimate, winner: Estimate, assumed: bool) -> str:
    """Names what takes most of the extra time of a loser."""
    more = {kind: seconds - winner.parts.get(kind, 0.0) for kind, seconds in loser.parts.items()}
    more["bubble"] = loser.bubble_seconds - winner.bubble_seconds
    before, waits = _waits(winner), _waits(loser)
    for key, (seconds, _) in waits.items():
        more[key] = seconds - (before[key][0] if key in before else 0.0)
    worst = max(more, key=lambda kind: more[kind])
    seconds = "" if assumed else f"{duration(more[worst])} "
    choice = loser.choice
    if worst in waits:
        row = waits[worst][1]
        axes = row.axes.split("+")
        word = "+".join(WORDS.get(axis, axis) for axis in axes)
        crosses = " leaves the node," if "+" in row.network or row.network in ("InfiniBand", "DCN") else ","
        return f"{word} {choice.size(*axes)}{crosses} {seconds}more of waiting for {row.op} on {row.network}"
    share = loser.bubble_seconds / loser.step_seconds
    texts = {
        "bubble": f"{seconds}more of waiting for other stages, {share:.0%} of the step",
        "again": f"{seconds}more of computing again (remat {_remat(choice)}"
        f"{'; XLA does so where memory is tight' if choice.remat == 'none' else ''})",
        "elementwise": f"{seconds}more of reading and writing memory, {_memory_cause(choice)}",
        "launch": f"{seconds}more of launching operations: {choice.accumulate} microbatches",
        "attention": f"{seconds}more of attention",
        "matmul": f"{seconds}more of multiplying: matrices are small, or read for few tokens",
    }
    return texts[worst]


def _memory_cause(choice: Choice) -> str:
    if choice.size(PIPELINE_AXIS) > 1:
        return "the buffers of pipeline stages among it"
    if choice.size("model") > 1:
        return "of what tensor parallelism gathers"
    return f"of weights and gradients {choice.accumulate} times a step" if choice.accumulate > 1 else "of whole weights"


def _remat(choice: Choice) -> str:
    return choice.remat if isinstance(choice.remat, str) else " ".join(choice.remat)


def _waits(estimate: Estimate) -> dict[str, tuple[float, Sent]]:
    """Returns seconds of waiting by what is sent, and the row that waits longest; weights include gradients."""
    out: dict[str, tuple[float, Sent]] = {}
    for row in estimate.traffic:
        key = "weights" if row.what in ("gradients", "once", "rows") else row.what
        seconds, longest = out.get(key, (0.0, row))
        out[key] = seconds + row.exposed, max(longest, row, key=lambda one: one.exposed)
    return out


def _plan_cause(loser: Plan, winner: Plan) -> str:
    kinds, others = loser.seconds_by.get("kind", {}), winner.seconds_by.get("kind", {})
    phases = loser.seconds_by.get("phase", {}), winner.seconds_by.get("phase", {})
    again = phases[0].get("remat", 0.0) - phases[1].get("remat", 0.0)
    memory = sum(kinds.get(kind, 0.0) - others.get(kind, 0.0) for kind in ("elementwise", "copy"))
    waiting = loser.bubble_seconds - winner.bubble_seconds
    more = {
        f"computing again takes {duration(again)} more": again,
        f"reading and writing memory takes {duration(memory)} more": memory,
        f"waiting for other stages takes {duration(waiting)} more": waiting,
    }  # fmt: skip
    before = {(row.axes, row.op): row.exposed for row in winner.traffic}
    for row in loser.traffic:
        extra = row.exposed - before.get((row.axes, row.op), 0.0)
        more[f"waiting for {row.op} over {row.axes} on {row.network} takes {duration(extra)} more"] = extra
    return max(more, key=lambda text: more[text])
