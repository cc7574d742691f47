"""Candidates of a search: the layout choices of a target, estimated and ordered, and the best of every family."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from jaxtrain.planning.choices import LayoutChoice
from jaxtrain.planning.cost.estimate import CostModel, Estimate
from jaxtrain.planning.hardware.chips import Switch
from jaxtrain.planning.search.families import families_of
from jaxtrain.planning.search.ranking import Objective, Value, objective_value
from jaxtrain.sharding.axes import AXES

SLACK = 1.1  # error of estimates: a choice that needs more of a device's memory is not compiled
PER_FAMILY = 16  # choices whose schedules are priced by their tables
PER_KIND, PER_MESH = 3, 2  # choices to compile with the same axes, ZeRO stage and schedule, or with the same mesh
Entry = tuple[Value, tuple[int, ...], LayoutChoice]
CLOCK_INTERVAL = 256  # choices between two checks of the deadline
INTERRUPTED, TIMED_OUT = "interrupted", "the time was up"


def _sort_key(entry: Entry) -> tuple:
    return entry[:2]


@dataclass(eq=False)
class CandidateSet:
    """Estimated layout choices of one target.

    Args:
        counted: number of choices.
        fitting: number of choices that may fit.
        stopped: why not all choices were estimated; else empty.
    """

    cost_model: CostModel
    objective: Objective
    counted: int = 0
    fitting: int = 0
    stopped: str = ""
    _ranked: list[Entry] = field(default_factory=list)
    _families: dict[str, list[Entry]] = field(default_factory=dict)
    _smallest: dict[str, tuple[float, LayoutChoice]] = field(default_factory=dict)

    @property
    def domain(self) -> int:
        """Number of devices on the fast network."""
        target, devices, inside = self.cost_model.target, self.cost_model.space.devices, self.cost_model.chip.inside
        if isinstance(inside, Switch):
            return min(devices, inside.domain_size(target.shape[1]) if len(target.shape) > 1 else devices)
        return devices // max(1, target.slices)

    def run(self, deadline: float, progress: Callable[[int], None] = lambda done: None) -> CandidateSet:
        """Estimates every choice, until the deadline (of `time.monotonic`) or Ctrl-C."""
        try:
            self._estimate_all(deadline, progress)
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        self._ranked.sort(key=_sort_key)
        return self

    def _estimate_all(self, deadline: float, progress: Callable[[int], None]) -> None:
        domain = self.domain
        too_large: tuple | None = None  # a mesh and schedule that do not fit even with remat full
        for choice in self.cost_model.space:
            self.counted += 1
            if self.counted % CLOCK_INTERVAL == 0:
                progress(self.counted)
                if time.monotonic() > deadline:
                    self.stopped = f"{TIMED_OUT} before all layouts were estimated"
                    break
            key = (
                choice.sizes, choice.zero, choice.context_parallel, choice.sequence_parallel, choice.microbatches,
                choice.schedule, choice.virtual_stages,
            )  # fmt: skip
            if key == too_large:
                continue
            bound = self.cost_model.lower_bound(choice)
            fits = bound.fits(SLACK)
            if not fits and choice.remat == "full":
                too_large = key  # other policies need more
            self._add(bound, fits, domain)

    def _add(self, estimate: Estimate, fits: bool, domain: int) -> None:
        choice = estimate.choice
        entry = self._value(estimate), choice.complexity, choice
        if fits:
            self.fitting += 1
            self._ranked.append(entry)
        for family in families_of(choice, domain):
            if fits:
                best = self._families.setdefault(family, [])
                best.append(entry)
                if len(best) > 4 * PER_FAMILY:
                    best[:] = heapq.nsmallest(PER_FAMILY, best, key=_sort_key)
            smallest = self._smallest.get(family)
            if smallest is None or estimate.needs < smallest[0]:
                self._smallest[family] = estimate.needs, choice

    def _value(self, estimate: Estimate) -> Value:
        return objective_value(self.objective, estimate.needs, estimate.step_seconds, estimate.choice.devices)

    def best_first(self) -> Iterator[Estimate]:
        """Yields estimates in order, best first, by merging them with the ordered lower bounds."""
        pending: list[tuple[Value, tuple, int, Estimate]] = []
        order = count()
        for bound, complexity, choice in self._ranked:
            while pending and pending[0][0] <= bound:
                yield heapq.heappop(pending)[-1]
            if (estimate := self.cost_model.estimate(choice)) is not None and estimate.fits(SLACK):
                heapq.heappush(pending, (self._value(estimate), complexity, next(order), estimate))
        while pending:
            yield heapq.heappop(pending)[-1]

    def shortlist(self) -> Iterator[Estimate]:
        """Yields the best estimates of different kinds, few with the same mesh."""
        seen: dict[tuple, int] = {}
        for estimate in self.best_first():
            choice, mesh = estimate.choice, estimate.choice.fsdp_sizes
            axes = tuple(axis for axis, size in zip(AXES, mesh) if size > 1)
            kind = axes, choice.zero % 3, choice.schedule
            if seen.get(kind, 0) < PER_KIND and seen.get(mesh, 0) < PER_MESH:
                for key in (kind, mesh):
                    seen[key] = seen.get(key, 0) + 1
                yield estimate

    def best_of(self, family: str) -> Estimate | None:
        """Best of a family; the smallest if none fits; None if none is legal."""
        entries = heapq.nsmallest(PER_FAMILY, self._families.get(family, []), key=_sort_key)
        estimates = [one for _, _, choice in entries if (one := self.cost_model.estimate(choice)) is not None]
        if estimates:
            return min([one for one in estimates if one.fits()] or estimates, key=self._value)
        return self.cost_model.estimate(self._smallest[family][1]) if family in self._smallest else None

    def why_none(self, family: str) -> str:
        """Explains why a family has no legal layout."""
        space = self.cost_model.space
        if family.startswith("pipeline") and not any(name.startswith("pipeline") for name in self._smallest):
            return f"no number of pipeline stages divides {space.config.model.layers} layers and the rows of a step"
        words = {"tensor": "heads", "context": "context", "expert": "expert"}
        word = next((word for prefix, word in words.items() if family.startswith(prefix)), "sequences")
        reasons = [reason for reason in space.refused if word in reason] or ["no legal mesh of these devices"]
        return next((reason for reason in reasons if reason.endswith(f" {space.devices} devices")), reasons[0])
