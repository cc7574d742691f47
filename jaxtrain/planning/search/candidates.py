"""Candidates of a search: choices for a target, estimated and ordered, and the best of every family."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count as counter
from typing import Literal

from jaxtrain.planning.choices import Choice
from jaxtrain.planning.cost.estimate import Estimate, Formula
from jaxtrain.planning.hardware.chips import Switch
from jaxtrain.planning.search import families
from jaxtrain.sharding.axes import AXES

Objective = Literal["time", "memory", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("time", "memory", "cost")
Value = tuple[float, float]  # what counts, then step seconds
SLACK = 1.1  # formulas err by so much: what needs more of a device's memory is not compiled
PER_FAMILY = 16  # whose schedules are priced by their real tables
PER_KIND, PER_MESH = 3, 2  # of the choices to compile that share axes, stage and schedule, or a mesh
Entry = tuple[Value, tuple[int, ...], Choice]
EVERY = 256  # choices between two looks at the clock
INTERRUPTED, LATE = "interrupted", "the time was up"


def value(objective: Objective, needs: float, step_seconds: float, devices: int) -> Value:
    """Returns the value that a search minimises: seconds of a step, bytes of a device, or device-seconds of a step."""
    first = {"time": step_seconds, "memory": needs, "cost": step_seconds * devices}[objective]
    return first, step_seconds


def _order(entry: Entry) -> tuple:
    return entry[:2]


@dataclass(eq=False)
class Survey:
    """The choices of one target.

    Args:
        counted, fitting: numbers of choices, and of those that may fit.
        stopped: why not all were looked at; else empty.
    """

    formula: Formula
    objective: Objective
    counted: int = 0
    fitting: int = 0
    stopped: str = ""
    _ranked: list[Entry] = field(default_factory=list)
    _families: dict[str, list[Entry]] = field(default_factory=dict)
    _smallest: dict[str, tuple[float, Choice]] = field(default_factory=dict)

    @property
    def inside(self) -> int:
        """Devices that the fast network joins."""
        chip, shape = self.formula.chip, self.formula.target.shape
        if isinstance(chip.inside, Switch):
            devices = self.formula.space.devices
            return min(devices, chip.inside.domain(shape[1]) if len(shape) > 1 else devices)
        return self.formula.space.devices // max(1, self.formula.target.slices)

    def run(self, deadline: float, progress: Callable[[int], None] = lambda done: None) -> Survey:
        """Looks at every choice, until the clock (`time.monotonic`) says `deadline`, or Ctrl-C."""
        try:
            self._look(deadline, progress)
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        self._ranked.sort(key=_order)
        return self

    def _look(self, deadline: float, progress: Callable[[int], None]) -> None:
        formula, inside = self.formula, self.inside
        hopeless: tuple | None = None
        for choice in formula.space:
            self.counted += 1
            if self.counted % EVERY == 0:
                progress(self.counted)
                if time.monotonic() > deadline:
                    self.stopped = f"{LATE} before all layouts were looked at"
                    break
            schedule = choice.accumulate, choice.schedule, choice.chunks
            place = choice.sizes, choice.zero, choice.context, choice.sequence, *schedule
            if place == hopeless:
                continue
            found = formula.bound(choice)
            fits = found.fits(SLACK)
            if not fits and choice.remat == "full":
                hopeless = place  # all else needs more
            self._note(found, fits, inside)

    def _note(self, found: Estimate, fits: bool, inside: int) -> None:
        choice = found.choice
        entry = self._value(found), choice.complexity, choice
        if fits:
            self.fitting += 1
            self._ranked.append(entry)
        for family in families.families(choice, inside):
            if fits:
                kept = self._families.setdefault(family, [])
                kept.append(entry)
                if len(kept) > 4 * PER_FAMILY:
                    kept[:] = heapq.nsmallest(PER_FAMILY, kept, key=_order)
            least = self._smallest.get(family)
            if least is None or found.needs < least[0]:
                self._smallest[family] = found.needs, choice

    def _value(self, found: Estimate) -> Value:
        return value(self.objective, found.needs, found.step_seconds, found.choice.devices)

    def best_first(self) -> Iterator[Estimate]:
        """Exact estimates in order. Bounds come in order, and none is above what it bounds."""
        ready: list[tuple[Value, tuple, int, Estimate]] = []
        order = counter()
        for bound, complexity, choice in self._ranked:
            while ready and ready[0][0] <= bound:
                yield heapq.heappop(ready)[-1]
            if (found := self.formula.exact(choice)) is not None and found.fits(SLACK):
                heapq.heappush(ready, (self._value(found), complexity, next(order), found))
        while ready:
            yield heapq.heappop(ready)[-1]

    def shortlist(self) -> Iterator[Estimate]:
        """The best, of different kinds: few that share a mesh."""
        seen: dict[tuple, int] = {}
        for found in self.best_first():
            choice, mesh = found.choice, found.choice.twin
            axes = tuple(axis for axis, size in zip(AXES, mesh) if size > 1)
            kind = axes, choice.zero % 3, choice.schedule
            if seen.get(kind, 0) < PER_KIND and seen.get(mesh, 0) < PER_MESH:
                for key in (kind, mesh):
                    seen[key] = seen.get(key, 0) + 1
                yield found

    def best_of(self, family: str) -> Estimate | None:
        """The best of a family; of those that all do not fit, the smallest; None where none is legal."""
        entries = heapq.nsmallest(PER_FAMILY, self._families.get(family, []), key=_order)
        found = [one for _, _, choice in entries if (one := self.formula.exact(choice)) is not None]
        fitting = [one for one in found if one.fits()]
        if fitting or found:
            return min(fitting or found, key=self._value)
        return self.formula.exact(self._smallest[family][1]) if family in self._smallest else None

    def why_none(self, family: str) -> str:
        """Explains why a family has no legal layout."""
        if family.startswith("pipeline") and not any(name.startswith("pipeline") for name in self._smallest):
            layers = self.formula.config.model.layers
            return f"no mesh of stages that {layers} layers and the rows of a step can be shared out to"
        refused = self.formula.space.refused
        words = {"tensor": "heads", "context": "context", "expert": "expert"}
        word = next((word for start, word in words.items() if family.startswith(start)), "sequences")
        found = [reason for reason in refused if word in reason] or ["no legal mesh of these devices"]
        everything = f" {self.formula.space.devices} devices"
        return next((reason for reason in found if reason.endswith(everything)), found[0])
