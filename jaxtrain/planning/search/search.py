"""Search for the best layout of a config on a target: estimates order all choices, the best are compiled.

Every choice is estimated (`cost.estimate`); the best are compiled in child processes (`planning.predict`), several in
parallel, and ranked by the memory and time of the compiled steps. Compiled plans are cached on disk, so an interrupted
search can be continued.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, did_you_mean, join_words
from jaxtrain.models.spec import is_decoder
from jaxtrain.planning import predict as predictor
from jaxtrain.planning.choices import LayoutChoice, SearchSpace
from jaxtrain.planning.compile import CompileTimeout
from jaxtrain.planning.cost.estimate import CostModel, Estimate
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.hardware.chips import GPUS, Torus
from jaxtrain.planning.hardware.targets import Target
from jaxtrain.planning.result import Plan
from jaxtrain.planning.search.candidates import INTERRUPTED, TIMED_OUT, CandidateSet
from jaxtrain.planning.search.families import FamilyResult, families_of, family_names, why_estimate_is_worse
from jaxtrain.planning.search.plan_cache import PlanCache
from jaxtrain.planning.search.ranking import OBJECTIVES, Objective, RankedLayout, SearchResult, objective_value

# ("estimate" or "compile", done, of, text); `of` is 0 if unknown
Progress = Callable[[str, int, int, str], None]
Predict = Callable[..., Plan]
ESTIMATE_SHARE = 0.6  # of the time budget, at most
MIN_SECONDS = 3.0  # to start compiling


def search(
    config: Config, vocab: int | None, target: str, *, devices: int | None = None, objective: Objective = "time",
    budget: float = 300.0, top: int = 8, jobs: int = 2, cache: str | os.PathLike[str] | None = None,
    progress: Progress = lambda *_: None, predict: Predict | None = None,
) -> SearchResult:  # fmt: skip
    """Ranks the layouts of a config.

    Args:
        config: whose layout to search.
        vocab: vocabulary size of the tokenizer; None for `model.vocab`.
        target: as `targets.parse` takes it, not `local`.
        devices: number of devices, instead of the target's.
        objective: to minimise: `time` of a step, `memory` of a device, or `cost`, the device-hours of the run, for
            which fewer devices are tried too.
        budget: seconds for the whole search.
        top: number of steps that fit to compile; 0 for estimates only.
        jobs: compilers in parallel.
        cache: folder of compiled plans; default: ~/.cache/jaxtrain/plan.
        progress: called with the progress.
        predict: compiles; takes (config, vocab, target, timeout=seconds). Default: `planning.predict`.

    Returns:
        the ranking.

    Raises:
        UserError: an unknown target, a number of devices that does not exist for it, a model that can not be
            estimated, an unknown vocabulary size, or no legal layout.
        KeyboardInterrupt: before the first layout was estimated; later, Ctrl-C ends the search with a result.
    """
    start = time.monotonic()
    for name, value, least in (("devices", devices, 1), ("top", top, 0), ("jobs", jobs, 1)):
        if value is not None and value < least:
            raise UserError(f"{name}: expected at least {least}, not {value}")
    vocab_size = vocab or config.model.vocab
    if objective not in OBJECTIVES:
        hint = did_you_mean(objective, OBJECTIVES) or f"; expected {join_words(OBJECTIVES)}"
        raise UserError(f"objective: no such objective `{objective}`{hint}")
    if config.sync.is_compressed:
        text = f"the search estimates gradients in full, not {config.sync.compress.gradients}; expected none"
        raise UserError(f"sync.compress.gradients: {text}")
    if config.sync.changes_gathers:
        text = "the search estimates plain gathers of weights; expected weights=none and secondary=0"
        raise UserError(f"sync.compress: {text}")
    if config.sync.is_loose:
        raise UserError(f"sync.strategy: the search estimates bsp, not {config.sync.strategy}; expected bsp")
    if vocab_size is None and is_decoder(config.model):
        raise UserError("model.vocab: estimates need the vocabulary size; expected it or a tokenizer")
    full = resize(targets.parse(target), devices)
    candidates: list[CandidateSet] = []
    for one in [full, *smaller_targets(full)] if objective == "cost" else [full]:
        cost_model = CostModel(SearchSpace(config, one.devices or 1, vocab_size or 0, one.slices), one)
        done = sum(other.counted for other in candidates)
        candidates.append(CandidateSet(cost_model, objective))
        deadline = start + ESTIMATE_SHARE * budget
        candidates[-1].run(deadline, lambda count, done=done: progress("estimate", done + count, 0, ""))
        if candidates[-1].stopped == INTERRUPTED:
            top = 0
            break
    if not any(one.counted for one in candidates):
        if candidates[0].stopped == INTERRUPTED:
            raise KeyboardInterrupt
        problem = next(iter(candidates[0].cost_model.space.refused), "stages or shards do not divide layers and rows")
        raise UserError(f"target {full}: no mesh of its devices is legal: {problem}")
    missing = targets.missing_packages(full, config.step.attention) if top and predict is None else None
    predict = predict or predictor.predict
    compiler = CandidateCompiler(config, vocab, candidates, start + budget, progress, predict, PlanCache(cache), jobs)
    compiler.run(0 if missing else top)
    result = compiler.result(time.monotonic() - start)
    return replace(result, top=top, stopped=missing or compiler.stopped)


def resize(target: Target, devices: int | None) -> Target:
    """Returns the target with another number of devices.

    Raises:
        UserError: `local`, or a number that does not exist for the target.
    """
    if target.platform == "local":
        raise UserError("target local: the number of devices is unknown before JAX starts; expected simulate:N")
    if devices is None or devices == target.devices:
        return target
    if target.kind in GPUS:
        per_node = target.shape[1]
        if devices % per_node and devices > per_node:
            raise UserError(f"devices: {devices} are not whole nodes of {per_node}; expected a multiple of {per_node}")
        return Target(target.kind, (1, devices) if devices <= per_node else (devices // per_node, per_node))
    if target.platform == "cpu":
        return Target(target.kind, (devices,))
    per_slice = (target.devices or 1) // target.slices
    if devices % per_slice == 0:
        return Target(target.kind, target.shape, devices // per_slice)
    resized = next((one for one in smaller_targets(target) if one.devices == devices), None)
    if resized is None:
        raise UserError(f"devices: {target} can not be resized to {devices} devices; expected a shape as the target")
    return resized


def smaller_targets(target: Target) -> Iterator[Target]:
    """Yields the target with half the devices, a quarter and so on: fewer nodes or slices first, then smaller ones."""
    shape, slices = list(target.shape), target.slices
    network = target.chip.inside if target.chip else None
    while True:
        if slices > 1:
            slices //= 2
        else:
            dim = shape.index(max(shape))
            if target.kind in GPUS:
                dim = 0 if shape[0] > 1 else 1
            shape[dim] //= 2
        if 0 in shape or (isinstance(network, Torus) and min(shape) < 2):
            return
        if not isinstance(network, Torus) or network.is_slice(shape):
            yield Target(target.kind, tuple(shape), slices)


@dataclass(eq=False)
class CandidateCompiler:
    """Compiles the best candidates until the deadline (of `time.monotonic`), and ranks them.

    Args:
        compiled: layouts that were compiled, or failed to.
        unfinished: candidates that were started and not finished.
        not_started: further candidates with a good estimate.
        stopped: why it ended early; else empty.
        cache_error: why plans could not be cached; else empty.
    """

    config: Config
    vocab: int | None
    candidate_sets: list[CandidateSet]
    deadline: float
    progress: Progress
    predict: Predict
    cache: PlanCache
    jobs: int
    compiled: list[RankedLayout] = field(default_factory=list)
    unfinished: list[Estimate] = field(default_factory=list)
    not_started: list[Estimate] = field(default_factory=list)
    stopped: str = ""
    cache_error: str = ""
    _finished: queue.Queue[RankedLayout] = field(default_factory=queue.Queue)
    _memory_ratios: dict[tuple[int, ...], float] = field(default_factory=dict)  # mesh sizes -> compiled / estimated

    def __post_init__(self) -> None:
        self.objective: Objective = self.candidate_sets[0].objective
        self.is_assumed = self.candidate_sets[0].cost_model.is_assumed
        self._cost_models = {one.cost_model.space.devices: one.cost_model for one in self.candidate_sets}

    def run(self, top: int) -> None:
        """Compiles until `top` candidates fit."""
        candidates = self._candidates()
        active = 0
        try:
            while self._fitting() + active < top or active:
                while active < self.jobs and self._fitting() + active < top and self._remaining() > MIN_SECONDS:
                    estimate = next(candidates, None)
                    if estimate is None:
                        break
                    active += 1
                    self._start(estimate)
                if not active:
                    break
                layout = self._finished.get(timeout=max(0.0, self._remaining()) + MIN_SECONDS)
                active -= 1
                self._record(layout)
                self.progress("compile", self._fitting(), top, str(layout.estimate.choice))
        except queue.Empty:
            self.stopped = TIMED_OUT
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        if not self.stopped and top and self._fitting() < top and self._remaining() <= MIN_SECONDS:
            self.stopped = TIMED_OUT
        self.stopped = self.stopped or next((one.stopped for one in self.candidate_sets if one.stopped), "")
        started = {one.choice for one in (*self.unfinished, *(layout.estimate for layout in self.compiled))}
        others = (one for one in self._candidates() if one.fits() and one.choice not in started)
        self.not_started = list(islice(others, max(0, max(top, 8) - self._fitting() - len(self.unfinished))))

    def _remaining(self) -> float:
        return self.deadline - time.monotonic()

    def _fitting(self) -> int:
        return sum(layout.plan is not None and layout.fits for layout in self.compiled)

    def _candidates(self) -> Iterator[Estimate]:
        """Merges the shortlists, best first, without candidates that are too large as compiled ones of their mesh."""
        lists = [one.shortlist() for one in self.candidate_sets]
        heads = {index: head for index, shortlist in enumerate(lists) if (head := next(shortlist, None)) is not None}
        while heads:
            index = min(heads, key=lambda index: (self._value(heads[index]), index))
            head = heads.pop(index)
            if (following := next(lists[index], None)) is not None:
                heads[index] = following
            ratio = self._memory_ratios.get(head.choice.sizes)
            if ratio is None or head.usable is None or head.needs * ratio <= head.usable:
                yield head

    def _value(self, estimate: Estimate) -> tuple:
        return objective_value(self.objective, estimate.needs, estimate.step_seconds, estimate.choice.devices)

    def _start(self, estimate: Estimate) -> None:
        self.unfinished.append(estimate)
        # A daemon thread, so that Ctrl-C does not wait for the compiler.
        threading.Thread(target=lambda: self._finished.put(self._compile(estimate)), daemon=True).start()

    def _layout(self, estimate: Estimate) -> RankedLayout:
        """The candidate of an estimate, before it is compiled."""
        cost_model = self._cost_models[estimate.choice.devices]
        return RankedLayout(estimate, cost_model.space.to_config(estimate.choice), str(cost_model.target))

    def _compile(self, estimate: Estimate) -> RankedLayout:
        """Adds a plan or an error to a candidate, or neither if the time was up."""
        layout = self._layout(estimate)
        key = self.cache.key(layout.config, self.vocab, layout.target)
        if (plan := self.cache.read(key)) is not None:
            return replace(layout, plan=plan, is_cached=True)
        try:
            plan = self.predict(layout.config, self.vocab, layout.target, timeout=max(1.0, self._remaining()))
        except CompileTimeout:
            return layout
        except Exception as error:  # a layout that does not compile is shown with its error, the search continues
            return replace(layout, error=str(error).splitlines()[0] if str(error) else repr(error))
        if not plan.compiled:
            return replace(layout, error=plan.reason)
        if targets.parse(layout.target).platform != "cpu":  # rates of a CPU are measured, so they hold only now
            try:
                self.cache.write(key, plan)
            except OSError as error:
                self.cache_error = f"{self.cache.folder}: {error.strerror or error}"
        return replace(layout, plan=plan)

    def _record(self, layout: RankedLayout) -> None:
        plan, estimate = layout.plan, layout.estimate
        if plan is None and not layout.error:
            return
        self.unfinished.remove(estimate)
        self.compiled.append(layout)
        if plan is not None and plan.needs:
            self._memory_ratios[estimate.choice.sizes] = plan.needs / estimate.needs

    def result(self, seconds: float) -> SearchResult:
        """Ranks the candidates; `seconds` is the time of the search."""
        layouts = sorted(self.compiled, key=self._sort_key)
        layouts += [replace(self._layout(one), unfinished=f"not compiled: {self.stopped}") for one in self.unfinished]
        layouts += map(self._layout, self.not_started)
        layouts.sort(key=lambda one: not one.fits)
        winner = layouts[0] if layouts and layouts[0].fits else None
        ranking = tuple(one.with_reason(winner, self.objective, self.is_assumed) for one in layouts)
        return SearchResult(
            str(self.candidate_sets[0].cost_model.target), self.objective, self.config, ranking,
            families=tuple(self._families({one.estimate.choice: one for one in ranking})),
            counted=sum(one.counted for one in self.candidate_sets),
            fitting=sum(one.fitting for one in self.candidate_sets),
            stopped=self.stopped, cache_error=self.cache_error, seconds=seconds, is_assumed=self.is_assumed,
        )  # fmt: skip

    def _sort_key(self, one: RankedLayout) -> tuple:
        choice = one.estimate.choice
        seconds = one.estimate.step_seconds if one.step_seconds is None else one.step_seconds
        return *objective_value(self.objective, one.needs, seconds, choice.devices), choice.complexity

    def _families(self, ranking: Mapping[LayoutChoice, RankedLayout]) -> Iterator[FamilyResult]:
        """Best of every family by estimate, without the families of the winner."""
        candidates = self.candidate_sets[0]
        domain, devices = candidates.domain, candidates.cost_model.space.devices
        winner = next((one.estimate for one in ranking.values() if one.fits), None)
        winner_families = set(families_of(winner.choice, domain)) if winner else set()
        for family in family_names(domain, devices, self.config.model.moe is not None):
            if family in winner_families:
                continue
            best = candidates.best_of(family)
            if best is None:
                yield FamilyResult(family, None, candidates.why_none(family))
            elif (ranked := ranking.get(best.choice)) and ranked.plan:
                yield FamilyResult(family, best, f"compiled: {ranked.reason}")
            elif winner is None and best.fits():
                yield FamilyResult(family, best, "fits by estimate, but is not compiled")
            else:
                reason = why_estimate_is_worse(best, winner or best, self.objective, self.is_assumed)
                yield FamilyResult(family, best, reason)
