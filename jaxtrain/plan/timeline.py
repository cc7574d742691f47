"""How much of each collective runs beside computing, by the order of a compiled program. No JAX.

CUDA programs say: a collective's `-start` and `-done` stand where the scheduler put them, and what is between runs at
the same time; collectives take one another's turns. A collective without the two (CPU) stops everything. TPU programs
show theirs in one piece, though the hardware runs them beside computing: of all collectives in a loop's body, as many
seconds are hidden as a share of the body's computing (`Calibration.overlap`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtrain.plan.cost import Cost
from jaxtrain.plan.hlo import Computation, Instruction, Module, trip_count

Key = tuple[str, str]  # (computation, instruction)


@dataclass
class Timeline:
    """Walks the computations that are run, each once.

    Args:
        computing: seconds of one run of an operation.
        moving: seconds of one run of a collective.
        overlap: as in `Calibration`.
    """

    module: Module
    computing: Mapping[Key, float]
    moving: Mapping[Key, float]
    overlap: float | None = None
    waits: dict[Key, float] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)

    def run(self, name: str) -> float:
        """Seconds of a computation; fills in `waits`."""
        if name not in self.durations:
            computation = self.module.computations.get(name, {})
            walk = self._scheduled if self.overlap is None else self._assumed
            self.durations[name] = walk(name, computation)
        return self.durations[name]

    def _scheduled(self, name: str, computation: Computation) -> float:
        now, free = 0.0, 0.0  # clocks of computing and of the network
        ends: dict[str, tuple[Key, float]] = {}
        for instruction in computation.values():
            key = self._collective(name, instruction)
            if instruction.op.endswith("-done") and instruction.operands[0] in ends:
                started, end = ends.pop(instruction.operands[0])
                self.waits[started] = max(0.0, end - now)
                now = max(now, end)
            elif key is None:
                now += self._own(name, instruction, computation)
            elif instruction.op.endswith("-start"):
                free = max(now, free) + self.moving[key]
                ends[instruction.name] = key, free
            else:
                self.waits[key] = self.moving[key]
                now = max(now, free) + self.moving[key]
        return now

    def _assumed(self, name: str, computation: Computation) -> float:
        keys = [key for one in computation.values() if (key := self._collective(name, one))]
        # What loops inside of this computation take is theirs to hide under.
        here = sum(self.computing.get((name, one.name), 0.0) for one in computation.values())
        inside = sum(
            self._own(name, one, computation)
            for one in computation.values()
            if one.op in ("while", "call", "conditional")
        )
        moving = sum(self.moving[key] for key in keys)
        hidden = min(moving, here * (self.overlap or 0.0))
        for key in keys:
            self.waits[key] = self.moving[key] * (1 - hidden / moving) if moving else 0.0
        return here + inside + moving - hidden

    def _own(self, name: str, instruction: Instruction, computation: Computation) -> float:
        """Seconds of an operation that is no collective, with what it calls."""
        if instruction.op == "while":
            return self.run(instruction.attribute("body")) * (trip_count(self.module, computation, instruction) or 1)
        if instruction.op == "conditional":
            return max((self.run(branch) for branch in instruction.branches), default=0.0)
        if instruction.op in ("call", "async-start"):
            return sum(self.run(called) for called in instruction.called)
        return self.computing.get((name, instruction.name), 0.0)

    def _collective(self, name: str, instruction: Instruction) -> Key | None:
        """The collective that an instruction is, or that a fusion or an asynchronous call is around."""
        if (name, instruction.name) in self.moving:
            return name, instruction.name
        if instruction.op not in ("fusion", "async-start"):
            return None
        for called in instruction.called:
            for one in self.module.computations.get(called, {}).values():
                if (called, one.name) in self.moving:
                    return called, one.name
        return None


def waits(module: Module, cost: Cost, moving: Mapping[Key, float], overlap: float | None = None) -> dict[Key, float]:
    """Seconds that computing stands still for one run of each collective."""
    computing = {
        (one.where, one.name): one.seconds for one in cost.operations if one.kind not in ("collective", "copy")
    }
    line = Timeline(module, computing, moving, overlap)
    line.run(module.entry)
    return line.waits
