"""Roofline of every operation of a compiled step: FLOPs, bytes, and the time of a chip.

Each operation that is not inside of a fusion takes max(FLOPs / rate, bytes / bandwidth) seconds, times the trip counts
of the loops around it. Of a conditional one branch runs: the costliest, unless the caller knows better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jaxtrain.hlo import matmuls, memory_traffic, parse
from jaxtrain.hlo.call_sites import trip_count
from jaxtrain.hlo.parse import Computation, Instruction, Module

Weights = Sequence[float]
# (conditional or loop of one turn or none, seconds of its branches)
Choose = Callable[[Instruction, Sequence[float]], "Weights | None"]
MOVES = ("collective", memory_traffic.TO_HOST, memory_traffic.FROM_HOST)
KINDS = ("matmul", "attention", "elementwise", "copy", "kernel", "pages", *MOVES)


class Rates(Protocol):
    """Rates of a chip."""

    def compute(self, kind: str, dtype: str) -> float:
        """FLOP/s of a `matmul` or of `attention`."""
        ...

    @property
    def memory(self) -> float:
        """Bytes/s."""
        ...

    @property
    def launch(self) -> float:
        """Seconds between one operation and the next."""
        ...


@dataclass(frozen=True)
class Balanced:
    """A chip of no particular speed, which weighs branches where none is given."""

    memory: float = 1e12
    launch: float = 0.0

    def compute(self, kind: str, dtype: str) -> float:
        """200 FLOPs for a byte."""
        return 2e14


@dataclass(frozen=True)
class Operation:
    """One operation and how often a step runs it on a device.

    Args:
        kind: one of KINDS; `copy` is a move that runs beside others, `kernel` one whose FLOPs nothing tells, `pages`
            the system's work of handing out memory; those of MOVES take no computing time.
        scope: JAX's name scopes, of itself or else of what is around it.
        times: product of trip counts and of the shares of branches.
        dtype: of what it multiplies, empty where it multiplies nothing.
        flops, inside: of one run, see `matmuls.Work`.
        bytes: read and written of the device's memory in one run.
        host: bytes between device and host in one run.
        seconds: of one run.
        where: the computation that holds it.
        turns: of the loops of one turn or none around it, outermost first (`Instruction.turn`).
        unknown: a loop around it has no constant trip count, and counts once.
    """

    name: str
    op: str
    kind: str
    scope: str = ""
    times: float = 1.0
    dtype: str = ""
    flops: float = 0.0
    inside: float = 0.0
    bytes: int = 0
    host: int = 0
    seconds: float = 0.0
    where: str = ""
    turns: tuple[str, ...] = ()
    unknown: bool = False

    @property
    def total(self) -> float:
        """Seconds of all runs."""
        return self.times * self.seconds

    @property
    def phase(self) -> str:
        """`forward`, `backward`, `remat` or `optimizer`; `pages` of what no pass asks for."""
        return self.kind if self.kind == "pages" else phase(self.scope)

    @property
    def part(self) -> str:
        """`loss`, `attention`, `embed`, `experts`, `layers` or, once a step, `optimizer`, `pages` or `other`."""
        return part(self)


def phase(scope: str) -> str:
    """Returns the pass of the step that a scope belongs to; operations without derivative are the optimizer's."""
    if "rematted_computation" in scope:
        return "remat"
    if "transpose(" in scope:
        return "backward"
    return "forward" if "jvp(" in scope else "optimizer"


def part(operation: Operation) -> str:
    """Returns the part of the model that an operation belongs to."""
    scope = operation.scope
    for word, name in (("cross_entropy", "loss"), ("attention_", "attention"), ("moe", "experts"), ("embed", "embed")):
        if word in scope:
            return name
    if operation.kind == "attention":
        return "attention"
    if operation.phase in ("optimizer", "pages"):
        return operation.phase
    return "layers" if "while" in scope else "other"


@dataclass(frozen=True)
class Cost:
    """Operations of a step on one device."""

    operations: list[Operation]
    memory: float = field(default=1e12)

    def flops(self, *, inside: bool = False) -> float:
        """FLOPs of a step by the convention of `jaxtrain.models.flops`, or also what kernels compute again inside."""
        return sum(one.times * (one.flops + one.inside * inside) for one in self.operations)

    @property
    def bytes(self) -> float:
        """Read and written of the device's memory."""
        return sum(one.times * one.bytes for one in self.operations)

    @property
    def seconds(self) -> float:
        """Seconds of computing, without collectives. Copies overlap operations that leave bandwidth unused."""
        busy = [one for one in self.operations if one.kind not in ("copy", *MOVES)]
        computing = sum(one.total for one in busy)
        idle = computing - sum(one.times * one.bytes for one in busy) / self.memory
        copies = sum(one.total for one in self.operations if one.kind == "copy")
        return computing + max(0.0, copies - idle)

    def by(self, *keys: str, value: str = "total") -> dict[Any, float]:
        """Seconds (or `flops`, `bytes`, of all runs) by attributes such as `phase`, `part`, `kind`, `dtype`."""
        out: dict[Any, float] = {}
        for one in self.operations:
            if one.kind in MOVES:
                continue
            key = tuple(getattr(one, name) for name in keys)
            key = key[0] if len(key) == 1 else key
            amount: float = one.total if value == "total" else one.times * getattr(one, value)
            out[key] = out.get(key, 0.0) + amount
        return {key: amount for key, amount in sorted(out.items(), key=lambda item: -item[1]) if amount}

    @property
    def unknown(self) -> list[str]:
        """Kernels whose FLOPs nothing tells."""
        return sorted({one.name for one in self.operations if one.kind == "kernel"})


def analyse(
    module: Module | str, rates: Rates | None = None, *, choose: Choose | None = None, visible: float = 0.5
) -> Cost:
    """The cost of a compiled step.

    Args:
        module: or `compiled.as_text()`.
        rates: of the chip; default: one that can do 200 FLOPs for a byte.
        choose: how often each branch of a conditional runs, in shares of the conditional's runs; None for the
            costliest alone.
        visible: share of all keys that a query sees in attention kernels that do not say (splash).

    Raises:
        ValueError: the text is no compiled program.
    """
    parsed = parse.parse(module) if isinstance(module, str) else module
    walk = _Walk(parsed, rates or Balanced(), choose, visible)
    return Cost(walk.operations(parsed.entry), walk.rates.memory)


@dataclass
class _Walk:
    """One pass over a module; what a computation costs is worked out once."""

    module: Module
    rates: Rates
    choose: Choose | None
    visible: float
    known: dict[str, list[Operation]] = field(default_factory=dict)
    multiplied: dict[str, list[tuple[matmuls.Work, str]]] = field(default_factory=dict)

    def operations(self, name: str) -> list[Operation]:
        """Yields the operations of a computation that is run, not fused."""
        if name not in self.known:
            computation = self.module.computations.get(name, {})
            self.known[name] = [
                one if one.where else replace(one, where=name)
                for instruction in computation.values() for one in self._of(instruction, computation)
            ]  # fmt: skip
        return self.known[name]

    def _of(self, instruction: Instruction, computation: Computation) -> Iterable[Operation]:
        if instruction.op == "while":
            return self._loop(instruction, computation)
        if instruction.op == "conditional":
            return self._conditional(instruction)
        if instruction.op in ("call", "async-start"):
            return [_around(one, instruction.scope) for name in instruction.called for one in self.operations(name)]
        made = self._operation(instruction, computation)
        return [] if made is None else [made]

    def _loop(self, loop: Instruction, computation: Computation) -> list[Operation]:
        inside = self.operations(loop.attribute("body"))
        if loop.turn:
            (share,) = self._weights(loop, [inside])
            return [
                replace(_around(one, loop.scope), times=one.times * share, turns=(loop.turn, *one.turns))
                for one in inside
            ]
        trips = trip_count(self.module, computation, loop)
        return [
            replace(
                _around(one, loop.scope), times=one.times * (1 if trips is None else trips),
                unknown=one.unknown or trips is None,
            )
            for one in inside
        ]  # fmt: skip

    def _conditional(self, instruction: Instruction) -> list[Operation]:
        branches = [self.operations(name) for name in instruction.branches]
        return [
            replace(_around(one, instruction.scope), times=one.times * weight)
            for branch, weight in zip(branches, self._weights(instruction, branches)) if weight
            for one in branch
        ]  # fmt: skip

    def _weights(self, instruction: Instruction, branches: list[list[Operation]]) -> Weights:
        """Returns how often each branch runs; a loop of at most one turn has one."""
        seconds = [sum(one.total for one in branch) for branch in branches]
        weights = self.choose(instruction, seconds) if self.choose else None
        return weights or [float(at == seconds.index(max(seconds))) for at in range(len(branches))]

    def _operation(self, instruction: Instruction, computation: Computation) -> Operation | None:
        moved = memory_traffic.moved(self.module, instruction, computation)
        direction, host = memory_traffic.with_host(self.module, instruction, computation)
        found = self._work(instruction, computation)
        if not (moved or host or found):
            return None
        dtype = max(found, key=lambda one: one[0].flops)[0].dtype if found else ""
        flops, inside = (sum(getattr(one, key) for one, _ in found) for key in ("flops", "inside"))
        scope = instruction.scope or next((scope for _, scope in found if scope), "")
        kind = direction if direction and not found else self._kind(instruction, [one for one, _ in found], scope)
        computing = sum((one.flops + one.inside) / self.rates.compute(kind, one.dtype) for one, _ in found)
        return Operation(
            instruction.name, instruction.op, kind, scope, 1.0, dtype, flops, inside, moved, host,
            max(computing, moved / self.rates.memory) + self.rates.launch,
        )  # fmt: skip

    def _kind(self, instruction: Instruction, found: list[matmuls.Work], scope: str) -> str:
        if any(one.attention for one in found) or (found and "attention_" in scope):
            return "attention"
        if found:  # a TPU multiplies in a fusion that a collective is carried through
            return "matmul"
        if instruction.collective or self._is_collective(instruction):
            return "collective"
        if instruction.op.endswith("-start"):
            return "copy"
        return "kernel" if matmuls.is_unknown(instruction) else "elementwise"

    def _is_collective(self, instruction: Instruction) -> bool:
        """A fusion around a collective, as TPU writes reduce-scatters."""
        inner = (self.module.computations.get(name, {}) for name in instruction.called if instruction.op == "fusion")
        return any(one.collective for computation in inner for one in computation.values())

    def _work(self, instruction: Instruction, computation: Computation) -> list[tuple[matmuls.Work, str]]:
        """(work, scope) of every matrix multiplication of an operation, inside of fusions too."""
        own = matmuls.work(instruction, computation, self.visible)
        if own is not None:
            return [(own, instruction.scope)]
        if instruction.op != "fusion":
            return []
        return [found for name in instruction.called for found in self._fused(name)]

    def _fused(self, name: str) -> list[tuple[matmuls.Work, str]]:
        if name not in self.multiplied:
            computation = self.module.computations.get(name, {})
            self.multiplied[name] = [found for one in computation.values() for found in self._work(one, computation)]
        return self.multiplied[name]


def _around(operation: Operation, scope: str) -> Operation:
    """Adds the enclosing scope to an operation that the compiler left without one, or with its last part only."""
    if operation.scope.startswith("jit(") or not scope:
        return operation
    return replace(operation, scope=f"{scope}/{operation.scope}" if operation.scope else scope)
