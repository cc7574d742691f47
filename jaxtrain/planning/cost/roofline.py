"""Roofline of every operation of a compiled step: FLOPs, bytes, and seconds on a chip.

Each operation outside of fusions takes max(FLOPs / rate, bytes / bandwidth) seconds, times the trip counts of the
enclosing loops. Of a conditional the costliest branch counts, unless the caller gives weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtrain.hlo import matmuls, memory_traffic, parse
from jaxtrain.hlo.call_sites import trip_count
from jaxtrain.hlo.matmuls import MatmulWork
from jaxtrain.hlo.parse import Computation, Instruction, Module
from jaxtrain.planning.hardware.calibration import Rates

# (conditional or loop that runs at most once, seconds of its branches) -> runs of each branch for each of its runs
BranchWeights = Callable[[Instruction, Sequence[float]], Sequence[float] | None]
TRANSFERS = ("collective", memory_traffic.TO_HOST, memory_traffic.FROM_HOST)
# (part of a name scope, part of the model); the first match counts.
SCOPES = (("cross_entropy", "loss"), ("attention_", "attention"), ("moe", "experts"), ("embed", "embed"))


@dataclass(frozen=True)
class Operation:
    """One operation of a device, and how often a step runs it.

    Args:
        kind: `matmul`, `attention`, `elementwise`, `copy` (overlaps with others), `kernel` (of unknown FLOPs), `pages`
            (allocation of memory by the system), or one of TRANSFERS, which take no compute time.
        scope: JAX's name scopes, of the operation or of what encloses it.
        runs: product of trip counts and of the weights of branches.
        dtype: element type of a matmul; empty for others.
        flops, recomputed: FLOPs of one run, see `MatmulWork`.
        bytes: bytes of device memory that one run reads and writes.
        host_bytes: bytes that one run moves between device and host.
        seconds: time of one run.
        computation: name of the computation that holds it.
        once_loops: enclosing loops that run at most once, outermost first (`Instruction.once_loop`).
        is_unbounded: an enclosing loop has no constant trip count, and counts as one trip.
    """

    name: str
    op: str
    kind: str
    scope: str = ""
    runs: float = 1.0
    dtype: str = ""
    flops: float = 0.0
    recomputed: float = 0.0
    bytes: int = 0
    host_bytes: int = 0
    seconds: float = 0.0
    computation: str = ""
    once_loops: tuple[str, ...] = ()
    is_unbounded: bool = False

    @property
    def total_seconds(self) -> float:
        """Seconds of all runs."""
        return self.runs * self.seconds

    @property
    def phase(self) -> str:
        """`forward`, `backward`, `remat`, `optimizer` (all that is not differentiated), or `pages`."""
        if self.kind == "pages":
            return self.kind
        if "rematted_computation" in self.scope:
            return "remat"
        if "transpose(" in self.scope:
            return "backward"
        return "forward" if "jvp(" in self.scope else "optimizer"

    @property
    def part(self) -> str:
        """Part of the model: `loss`, `attention`, `embed`, `experts`, `layers`, `optimizer`, `pages` or `other`."""
        if part := next((part for word, part in SCOPES if word in self.scope), ""):
            return part
        if self.kind == "attention":
            return self.kind
        if self.phase in ("optimizer", "pages"):
            return self.phase
        return "layers" if "while" in self.scope else "other"


@dataclass(frozen=True)
class StepCost:
    """Operations of a step on one device. `bandwidth` is that of the memory, in bytes/s."""

    operations: list[Operation]
    bandwidth: float = 1e12

    def flops(self) -> float:
        """FLOPs of a step by the convention of `jaxtrain.models.flops`."""
        return sum(one.runs * one.flops for one in self.operations)

    @property
    def bytes(self) -> float:
        """Bytes of device memory read and written."""
        return sum(one.runs * one.bytes for one in self.operations)

    @property
    def seconds(self) -> float:
        """Compute seconds, without transfers. Copies overlap with operations that leave bandwidth unused."""
        busy = [one for one in self.operations if one.kind not in ("copy", *TRANSFERS)]
        compute = sum(one.total_seconds for one in busy)
        idle = compute - sum(one.runs * one.bytes for one in busy) / self.bandwidth
        copies = sum(one.total_seconds for one in self.operations if one.kind == "copy")
        return compute + max(0.0, copies - idle)

    def by(self, *keys: str, value: str = "seconds") -> dict[Any, float]:
        """Seconds (or `flops`, `bytes`) of all runs, by attributes such as `phase`, `part`, `kind`, `dtype`."""
        out: dict[Any, float] = {}
        for one in self.operations:
            if one.kind not in TRANSFERS:
                group = tuple(getattr(one, name) for name in keys)
                key = group[0] if len(group) == 1 else group
                out[key] = out.get(key, 0.0) + one.runs * getattr(one, value)
        return {key: amount for key, amount in sorted(out.items(), key=lambda item: -item[1]) if amount}

    @property
    def unknown_kernels(self) -> list[str]:
        """Names of the kernels whose FLOPs are not known."""
        return sorted({one.name for one in self.operations if one.kind == "kernel"})


def analyze(
    module: Module | str, rates: Rates | None = None, *, branch_weights: BranchWeights | None = None,
    visible: float = 0.5,
) -> StepCost:  # fmt: skip
    """Computes the cost of a compiled step.

    Args:
        module: the parsed program, or `compiled.as_text()`.
        rates: of the chip; default: one of 200 FLOPs per byte.
        branch_weights: how often each branch of a conditional runs; if it returns None, only the costliest runs.
        visible: share of all keys that a query attends to, for attention kernels that do not say (splash).

    Raises:
        ValueError: the text is no compiled program.
    """
    parsed = parse.parse(module) if isinstance(module, str) else module
    rates = rates or Rates(lambda kind, dtype: 2e14, 1e12)
    return StepCost(_Analysis(parsed, rates, branch_weights, visible).operations(parsed.entry), rates.memory)


@dataclass
class _Analysis:
    """One pass over a module, which visits each computation once."""

    module: Module
    rates: Rates
    branch_weights: BranchWeights | None
    visible: float
    _operations: dict[str, list[Operation]] = field(default_factory=dict)
    _fused: dict[str, list[tuple[MatmulWork, str]]] = field(default_factory=dict)

    def operations(self, name: str) -> list[Operation]:
        """Operations of a computation that is run, not fused."""
        if name not in self._operations:
            computation = self.module.computations.get(name, {})
            self._operations[name] = [
                one if one.computation else replace(one, computation=name)
                for instruction in computation.values() for one in self._expand(instruction, computation)
            ]  # fmt: skip
        return self._operations[name]

    def _expand(self, instruction: Instruction, computation: Computation) -> Iterable[Operation]:
        """Operations that an instruction runs."""
        if instruction.op == "while":
            return self._loop(instruction, computation)
        if instruction.op == "conditional":
            return self._conditional(instruction)
        if instruction.op in ("call", "async-start"):
            called = (one for name in instruction.called for one in self.operations(name))
            return [_with_outer_scope(one, instruction.scope) for one in called]
        operation = self._operation(instruction, computation)
        return [] if operation is None else [operation]

    def _loop(self, loop: Instruction, computation: Computation) -> list[Operation]:
        body = [_with_outer_scope(one, loop.scope) for one in self.operations(loop.attribute("body"))]
        if loop.once_loop:
            (runs,) = self._weights(loop, [body])
            return [replace(one, runs=one.runs * runs, once_loops=(loop.once_loop, *one.once_loops)) for one in body]
        trips = trip_count(self.module, computation, loop)
        if trips is None:
            return [replace(one, is_unbounded=True) for one in body]
        return [replace(one, runs=one.runs * trips) for one in body]

    def _conditional(self, instruction: Instruction) -> list[Operation]:
        branches = [self.operations(name) for name in instruction.branches]
        return [
            replace(_with_outer_scope(one, instruction.scope), runs=one.runs * weight)
            for branch, weight in zip(branches, self._weights(instruction, branches)) if weight
            for one in branch
        ]  # fmt: skip

    def _weights(self, instruction: Instruction, branches: list[list[Operation]]) -> Sequence[float]:
        """Runs of each branch for each run of the instruction."""
        seconds = [sum(one.total_seconds for one in branch) for branch in branches]
        weights = self.branch_weights(instruction, seconds) if self.branch_weights else None
        return weights or [float(index == seconds.index(max(seconds))) for index in range(len(branches))]

    def _operation(self, instruction: Instruction, computation: Computation) -> Operation | None:
        hbm_bytes = memory_traffic.hbm_bytes(self.module, instruction, computation)
        direction, host_bytes = memory_traffic.host_transfer(self.module, instruction, computation)
        work = self._work(instruction, computation)
        if not (hbm_bytes or host_bytes or work):
            return None
        scope = instruction.scope or next((scope for _, scope in work if scope), "")
        kind = direction if direction and not work else self._kind(instruction, [one for one, _ in work], scope)
        compute = sum((one.flops + one.recomputed) / self.rates.compute(kind, one.dtype) for one, _ in work)
        return Operation(
            instruction.name, instruction.op, kind, scope,
            dtype=max(work, key=lambda one: one[0].flops)[0].dtype if work else "",
            flops=sum(one.flops for one, _ in work), recomputed=sum(one.recomputed for one, _ in work),
            bytes=hbm_bytes, host_bytes=host_bytes,
            seconds=max(compute, hbm_bytes / self.rates.memory) + self.rates.launch,
        )  # fmt: skip

    def _kind(self, instruction: Instruction, work: list[MatmulWork], scope: str) -> str:
        if any(one.is_attention for one in work) or (work and "attention_" in scope):
            return "attention"
        if work:  # a TPU multiplies in a fusion that carries a collective
            return "matmul"
        if instruction.collective or self._is_fused_collective(instruction):
            return "collective"
        if instruction.op.endswith("-start"):
            return "copy"
        return "kernel" if matmuls.is_unknown_kernel(instruction) else "elementwise"

    def _is_fused_collective(self, instruction: Instruction) -> bool:
        """Returns whether this is a fusion around a collective, as TPU writes reduce-scatters."""
        inner = (self.module.computations.get(name, {}) for name in instruction.called if instruction.op == "fusion")
        return any(one.collective for computation in inner for one in computation.values())

    def _work(self, instruction: Instruction, computation: Computation) -> list[tuple[MatmulWork, str]]:
        """(work, scope) of every matrix multiplication of an operation, also inside fusions."""
        work = matmuls.matmul_work(instruction, computation, self.visible)
        if work is not None:
            return [(work, instruction.scope)]
        if instruction.op != "fusion":
            return []
        return [one for name in instruction.called for one in self._fused_work(name)]

    def _fused_work(self, name: str) -> list[tuple[MatmulWork, str]]:
        if name not in self._fused:
            computation = self.module.computations.get(name, {})
            self._fused[name] = [work for one in computation.values() for work in self._work(one, computation)]
        return self._fused[name]


def _with_outer_scope(operation: Operation, scope: str) -> Operation:
    """Adds the enclosing scope to an operation that the compiler left without one, or with its last part only."""
    if operation.scope.startswith("jit(") or not scope:
        return operation
    return replace(operation, scope=f"{scope}/{operation.scope}" if operation.scope else scope)
