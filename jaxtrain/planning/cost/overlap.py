"""Overlap of transfers and computation, simulated in the order of a compiled program.

Instructions between a collective's start and its end overlap with it; a collective without the two blocks. CUDA
programs and TPU's permutes write `-start` and `-done`; TPU programs carry other collectives through the fusions that
compute meanwhile (`jaxtrain.hlo.call_sites.async_chain`), or block. Between slices a TPU sends to its host and receives
with a `recv-done`. Transfers on the same channel run one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtrain.hlo.call_sites import async_chain, trip_count
from jaxtrain.hlo.parse import Computation, Instruction, Module
from jaxtrain.planning.cost.roofline import TRANSFERS, StepCost

Key = tuple[str, str]  # (computation, instruction)


class TransferTime(NamedTuple):
    """Seconds of one run of a collective or of a copy between device and host, and the channel that it occupies."""

    seconds: float
    channel: str = ""


@dataclass
class Timeline:
    """Simulates every computation that is run, once.

    Args:
        compute: seconds of one run of each operation.
        transfers: by instruction.
        exposed: result: seconds for which computation waits in one run of each transfer.
    """

    module: Module
    compute: Mapping[Key, float]
    transfers: Mapping[Key, TransferTime]
    exposed: dict[Key, float] = field(default_factory=dict)
    _durations: dict[str, float] = field(default_factory=dict)

    def run(self, name: str) -> float:
        """Returns the seconds of a computation, and fills in `exposed`."""
        if name not in self._durations:
            self._durations[name] = self._simulate(name, self.module.computations.get(name, {}))
        return self._durations[name]

    def _simulate(self, name: str, computation: Computation) -> float:
        now = 0.0
        channel_free: dict[str, float] = {}
        pending: dict[str, tuple[Key, float]] = {}  # id of a started transfer -> instruction, end
        for instruction in computation.values():
            started, finished = self._async_ids(instruction, computation)
            if finished in pending:
                key, end = pending.pop(finished)
                self.exposed[key] = max(0.0, end - now)
                now = max(now, end)
            key = self._transfer_key(name, instruction)
            now += self._compute_seconds(name, instruction, computation)
            if key is None:
                continue
            seconds, channel = self.transfers[key]
            end = channel_free[channel] = max(now, channel_free.get(channel, 0.0)) + seconds
            if started:
                pending[started] = key, end
            else:
                self.exposed[key] = end - now
                now = end
        return now

    def _compute_seconds(self, name: str, instruction: Instruction, computation: Computation) -> float:
        """Seconds that an operation computes, with what it calls."""
        if instruction.op == "while":
            return self.run(instruction.attribute("body")) * (trip_count(self.module, computation, instruction) or 1)
        if instruction.op == "conditional":
            return max((self.run(branch) for branch in instruction.branches), default=0.0)
        if instruction.op in ("call", "async-start") and self._transfer_key(name, instruction) is None:
            return sum(self.run(called) for called in instruction.called)
        return self.compute.get((name, instruction.name), 0.0)

    def _transfer_key(self, name: str, instruction: Instruction) -> Key | None:
        """Key of a transfer: of this instruction, or of a collective within its fusion or asynchronous call."""
        if (name, instruction.name) in self.transfers:
            return name, instruction.name
        if instruction.op not in ("fusion", "async-start"):
            return None
        inner = ((called, one) for called in instruction.called for one in self.module.computations.get(called, {}))
        return next((key for key in inner if key in self.transfers), None)

    def _async_ids(self, instruction: Instruction, computation: Computation) -> tuple[str, str]:
        """(id of the transfer that starts here, id of the one that ends here); empty if none does."""
        op = instruction.op
        if op == "send" or op.endswith("-start"):
            return instruction.rendezvous or instruction.name, ""
        if op.endswith("-done") and op != "send-done":
            start = computation.get(instruction.operands[0])
            return "", (start.rendezvous if start else "") or instruction.operands[0]
        if op != "fusion" or not instruction.called:
            return "", ""
        chain, position = async_chain(self.module.computations.get(instruction.called[0], {}))
        return chain if position == "start" else "", chain if position == "done" else ""


def exposed_seconds(module: Module, cost: StepCost, transfers: Mapping[Key, TransferTime]) -> dict[Key, float]:
    """Seconds for which computation waits in one run of each transfer."""
    compute = {
        (one.computation, one.name): one.seconds for one in cost.operations if one.kind not in ("copy", *TRANSFERS)
    }
    timeline = Timeline(module, compute, transfers)
    timeline.run(module.entry)
    return timeline.exposed
