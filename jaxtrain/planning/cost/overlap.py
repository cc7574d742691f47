"""Overlap of communication and computation, by the order of a compiled program.

A compiled program is a schedule: what stands between a collective's start and its end runs at the same time, and a
collective without the two stops everything. CUDA programs and TPU's permutes write `-start` and `-done`; TPU programs
carry other collectives through the fusions that compute meanwhile (`jaxtrain.hlo.call_sites.chained`), or leave them
whole: then the chip waits. Between slices a TPU gives what it sends to its host, and has the answer by a `recv-done`.
What uses the same wires takes turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtrain.hlo.call_sites import chained, trip_count
from jaxtrain.hlo.parse import Computation, Instruction, Module
from jaxtrain.planning.cost.roofline import MOVES, Cost

Key = tuple[str, str]  # (computation, instruction)


class Move(NamedTuple):
    """One run of a collective, or of a copy between device and host: its seconds, and the wires that it takes."""

    seconds: float
    wires: str = ""


@dataclass
class Timeline:
    """Walks the computations that are run, each once.

    Args:
        computing: seconds of one run of an operation.
        moving: what moves.
    """

    module: Module
    computing: Mapping[Key, float]
    moving: Mapping[Key, Move]
    waits: dict[Key, float] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)

    def run(self, name: str) -> float:
        """Seconds of a computation; fills in `waits`."""
        if name not in self.durations:
            self.durations[name] = self._walk(name, self.module.computations.get(name, {}))
        return self.durations[name]

    def _walk(self, name: str, computation: Computation) -> float:
        now = 0.0
        free: dict[str, float] = {}  # clocks of the wires
        ends: dict[str, tuple[Key, float]] = {}  # of what was started, by the name or chain by which its end knows it
        for instruction in computation.values():
            key, (begins, ended) = self._moving(name, instruction), self._ends(instruction, computation)
            if ended in ends:
                started, end = ends.pop(ended)
                self.waits[started] = max(0.0, end - now)
                now = max(now, end)
            now += self._own(name, instruction, computation)
            if key is None:
                continue
            seconds, wires = self.moving[key]
            end = free[wires] = max(now, free.get(wires, 0.0)) + seconds
            if begins:
                ends[begins] = key, end
            else:
                self.waits[key] = end - now
                now = end
        return now

    def _own(self, name: str, instruction: Instruction, computation: Computation) -> float:
        """Seconds that an operation computes, with what it calls."""
        if instruction.op == "while":
            return self.run(instruction.attribute("body")) * (trip_count(self.module, computation, instruction) or 1)
        if instruction.op == "conditional":
            return max((self.run(branch) for branch in instruction.branches), default=0.0)
        if instruction.op in ("call", "async-start") and self._moving(name, instruction) is None:
            return sum(self.run(called) for called in instruction.called)
        return self.computing.get((name, instruction.name), 0.0)

    def _moving(self, name: str, instruction: Instruction) -> Key | None:
        """Returns the communicating instruction: this one, or a collective within a fusion or an asynchronous call."""
        if (name, instruction.name) in self.moving:
            return name, instruction.name
        if instruction.op not in ("fusion", "async-start"):
            return None
        for called in instruction.called:
            for one in self.module.computations.get(called, {}).values():
                if (called, one.name) in self.moving:
                    return called, one.name
        return None

    def _ends(self, instruction: Instruction, computation: Computation) -> tuple[str, str]:
        """(name by which its end will know what begins here, the same of what ends here); empty of anything else."""
        op = instruction.op
        if op == "send" or op.endswith("-start"):
            return instruction.rendezvous or instruction.name, ""
        if op.endswith("-done") and op != "send-done":
            begun = computation.get(instruction.operands[0])
            return "", (begun.rendezvous if begun else "") or instruction.operands[0]
        if op != "fusion" or not instruction.called:
            return "", ""
        chain, place = chained(self.module.computations.get(instruction.called[0], {}))
        return chain if place == "start" else "", chain if place == "done" else ""


def waits(module: Module, cost: Cost, moving: Mapping[Key, Move]) -> dict[Key, float]:
    """Seconds that computing stands still for one run of each thing that moves."""
    computing = {(one.where, one.name): one.seconds for one in cost.operations if one.kind not in ("copy", *MOVES)}
    line = Timeline(module, computing, moving)
    line.run(module.entry)
    return line.waits
