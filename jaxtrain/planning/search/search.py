"""The best layout for a config on a target: formulas order all choices, the compiler judges the best.

Every choice is estimated (`plan.formula`), the best are compiled in processes of their own (`plan.predict`), several at
a time, and ranked by what the compiled steps need and take. What was compiled is kept on disk: a search that was
stopped, by its budget or by Ctrl-C, goes on where it ended.
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
from jaxtrain.planning.choices import Choice, Space
from jaxtrain.planning.compile import TimedOut
from jaxtrain.planning.cost.estimate import Estimate, Formula
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.hardware.chips import GPUS, Torus
from jaxtrain.planning.hardware.targets import Target
from jaxtrain.planning.result import Plan
from jaxtrain.planning.search import families
from jaxtrain.planning.search.candidates import INTERRUPTED, LATE, OBJECTIVES, Objective, Survey, value
from jaxtrain.planning.search.families import Loser
from jaxtrain.planning.search.plan_cache import Results
from jaxtrain.planning.search.ranking import Ranked, SearchResult

Progress = Callable[[str, int, int, str], None]  # ("formula" or "compile", done, of, what); of is 0 where not known
Predict = Callable[..., Plan]
FORMULAS = 0.6  # of the budget, at most
LEAST = 3.0  # seconds: in less nothing is compiled


def search(
    config: Config, vocab: int | None, target: str, *, devices: int | None = None, objective: Objective = "time",
    budget: float = 300.0, top: int = 8, jobs: int = 2, cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None, predict: Predict | None = None,
) -> SearchResult:  # fmt: skip
    """The ranking of layouts for a config.

    Args:
        vocab: of the tokenizer; None takes `model.vocab`.
        target: as `targets.parse` takes it, not `local`.
        devices: number of them, instead of the target's.
        objective: what to make small: `time` of a step, `memory` of a device, or `cost`, the device-hours of the run,
            for which fewer devices are tried too.
        budget: seconds for everything.
        top: steps that fit to compile; 0 for formulas alone.
        jobs: compilers at a time.
        cache: folder of compiled plans; default: ~/.cache/jaxtrain/plan.
        progress: told how far it is.
        predict: compiles; takes (config, vocab, target, timeout=seconds). Default: `plan.predict`.

    Raises:
        UserError: an unknown target, a number of devices that it does not come in, a model without formulas, no size
            of the vocabulary, or no layout that is legal.
        KeyboardInterrupt: before any layout was looked at; later it ends the search, which says so.
    """
    start, tell = time.monotonic(), progress or (lambda *_: None)
    for name, given, least in (("devices", devices, 1), ("top", top, 0), ("jobs", jobs, 1)):
        if given is not None and given < least:
            raise UserError(f"{name}: expected {least} or more; found {given}")
    size = vocab or config.model.vocab
    if objective not in OBJECTIVES:
        hint = did_you_mean(objective, OBJECTIVES) or f"; expected {join_words(OBJECTIVES)}"
        raise UserError(f"objective: no such objective `{objective}`{hint}")
    if size is None and is_decoder(config.model):
        raise UserError("model.vocab: the formulas need the size of the vocabulary; set it, or give a tokenizer")
    where = resized(targets.parse(target), devices)
    wheres = [where, *smaller(where)] if objective == "cost" else [where]
    surveys = []
    for one in wheres:
        formula = Formula(Space(config, one.devices or 1, size or 0, one.slices), one)
        done = sum(survey.counted for survey in surveys)
        survey = Survey(formula, objective)
        surveys.append(survey.run(start + FORMULAS * budget, lambda n, done=done: tell("formula", done + n, 0, "")))
        if survey.stopped == INTERRUPTED:
            top = 0
            break
    if not any(survey.counted for survey in surveys):
        if surveys[0].stopped == INTERRUPTED:
            raise KeyboardInterrupt
        raise UserError(f"target {where}: no mesh of its devices is legal: {_first(surveys[0])}")
    missing = targets.missing(where, config.step.attention) if top and predict is None else None
    compiler, kept = predict or predictor.predict, Results.open(cache)
    judge = Judge(config, vocab, surveys, start + budget, tell, compiler, kept, jobs)
    judge.run(0 if missing else top)
    return replace(judge.found(time.monotonic() - start), top=top, stopped=missing or judge.stopped)


def _first(survey: Survey) -> str:
    return next(iter(survey.formula.space.refused), "its layers and rows cannot be shared out")


def resized(target: Target, devices: int | None) -> Target:
    """The target with so many devices.

    Raises:
        UserError: `local`, or a number that the target does not come in.
    """
    if target.platform == "local":
        raise UserError("target local: how many devices there are is not known before JAX starts; expected simulate:N")
    if devices is None or devices == target.devices:
        return target
    if target.kind in GPUS:
        per = target.shape[1]
        if devices % per and devices > per:
            raise UserError(f"devices: {devices} are no whole nodes of {per}; expected a multiple of {per}")
        return Target(target.kind, (1, devices) if devices <= per else (devices // per, per))
    if target.platform == "cpu":
        return Target(target.kind, (devices,))
    each = (target.devices or 1) // target.slices
    if devices % each == 0:
        return Target(target.kind, target.shape, devices // each)
    fitting = next((one for one in smaller(target) if one.devices == devices), None)
    if fitting is None:
        raise UserError(f"devices: {target.kind} has no slice of {devices} devices here; give its shape as the target")
    return fitting


def smaller(target: Target) -> Iterator[Target]:
    """The same with half the devices, a quarter and so on, as they are sold: fewer nodes or slices, then smaller."""
    shape, slices = list(target.shape), target.slices
    while True:
        if slices > 1:
            slices //= 2
        elif target.kind in GPUS:
            at = 0 if shape[0] > 1 else 1
            shape[at] //= 2
        else:
            at = shape.index(max(shape))
            shape[at] //= 2
        made = Target(target.kind, tuple(shape), slices)
        if 0 in shape or (target.chip and target.platform == "tpu" and min(shape) < 2):
            return
        network = target.chip.inside if target.chip else None
        if not isinstance(network, Torus) or network.has(shape):
            yield made


@dataclass(frozen=True)
class CompileOutcome:
    """Outcome of compiling a choice: a plan, an error, or neither in time."""

    estimate: Estimate
    plan: Plan | None = None
    cached: bool = False
    error: str = ""


@dataclass(eq=False)
class Judge:
    """Compiles the best of the surveys until the clock says `deadline`, and ranks them."""

    config: Config
    vocab: int | None
    surveys: list[Survey]
    deadline: float
    tell: Progress
    predict: Predict
    results: Results
    jobs: int
    verdicts: list[CompileOutcome] = field(default_factory=list)
    begun: list[Estimate] = field(default_factory=list)  # and not ended
    waiting: list[Estimate] = field(default_factory=list)
    stopped: str = ""
    unkept: str = ""
    _done: queue.Queue[CompileOutcome] = field(default_factory=queue.Queue)
    _ratios: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objective: Objective = self.surveys[0].objective
        self._of = {survey.formula.space.devices: survey for survey in self.surveys}

    def run(self, top: int) -> None:
        """Compiles until `top` of them fit."""
        candidates = self._candidates()
        active = 0
        try:
            while self._fitting() + active < top or active:
                while active < self.jobs and self._fitting() + active < top and self._left() > LEAST:
                    estimate = next(candidates, None)
                    if estimate is None:
                        break
                    active += 1
                    self._start(estimate)
                if not active:
                    break
                verdict = self._done.get(timeout=max(0.0, self._left()) + LEAST)
                active -= 1
                self._take(verdict)
                self.tell("compile", self._fitting(), top, str(verdict.estimate.choice))
        except queue.Empty:
            self.stopped = LATE
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        if not self.stopped and top and self._fitting() < top and self._left() <= LEAST:
            self.stopped = LATE
        self.stopped = self.stopped or next((survey.stopped for survey in self.surveys if survey.stopped), "")
        tried = {one.choice for one in (*self.begun, *(verdict.estimate for verdict in self.verdicts))}
        rest = (one for one in self._candidates() if one.fits() and one.choice not in tried)
        self.waiting = list(islice(rest, max(0, max(top, 8) - self._fitting() - len(self.begun))))

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _fitting(self) -> int:
        return sum(verdict.plan is not None and verdict.plan.fits is not False for verdict in self.verdicts)

    def _candidates(self) -> Iterator[Estimate]:
        """The shortlists of all surveys, best first; not those that compiled ones of their mesh tell will not fit."""
        lists = [survey.shortlist() for survey in self.surveys]
        heads = [next(one, None) for one in lists]
        while any(head is not None for head in heads):
            at = min((i for i, head in enumerate(heads) if head is not None), key=lambda i: self._estimated(heads[i]))
            head, heads[at] = heads[at], next(lists[at], None)
            if head is not None and self._may_fit(head):
                yield head

    def _may_fit(self, estimate: Estimate) -> bool:
        ratio = self._ratios.get(estimate.choice.sizes)
        return ratio is None or estimate.usable is None or estimate.needs * ratio <= estimate.usable

    def _estimated(self, estimate: Estimate | None) -> tuple:
        assert estimate is not None
        return value(self.objective, estimate.needs, estimate.step_seconds, estimate.choice.devices)

    def _start(self, estimate: Estimate) -> None:
        self.begun.append(estimate)
        # A daemon: on Ctrl-C nobody waits for the compiler.
        threading.Thread(target=lambda: self._done.put(self._judged(estimate)), daemon=True).start()

    def _judged(self, estimate: Estimate) -> CompileOutcome:
        config, target = self._configured(estimate), self._target(estimate)
        key = self.results.key(config, self.vocab, str(target))
        if (known := self.results.read(key)) is not None:
            return CompileOutcome(estimate, known, cached=True)
        try:
            plan = self.predict(config, self.vocab, str(target), timeout=max(1.0, self._left()))
        except TimedOut:
            return CompileOutcome(estimate)
        except Exception as error:  # one layout that does not compile ends no search: it is shown with what was said
            return CompileOutcome(estimate, error=str(error).splitlines()[0] if str(error) else repr(error))
        if not plan.compiled:
            return CompileOutcome(estimate, error=plan.reason)
        if target.platform != "cpu":  # whose seconds are measured: they are those of this moment
            self._keep(key, plan)
        return CompileOutcome(estimate, plan)

    def _keep(self, key: str, plan: Plan) -> None:
        try:
            self.results.write(key, plan)
        except OSError as error:
            self.unkept = f"{self.results.folder}: {error.strerror or error}"

    def _take(self, verdict: CompileOutcome) -> None:
        plan, estimate = verdict.plan, verdict.estimate
        if plan is None and not verdict.error:
            return
        self.begun.remove(estimate)
        self.verdicts.append(verdict)
        if plan is not None and plan.needs:
            self._ratios[estimate.choice.sizes] = plan.needs / estimate.needs

    def found(self, seconds: float) -> SearchResult:
        """The ranking."""
        late = f"not compiled: {self.stopped}"
        order = sorted((self._ranked(verdict) for verdict in self.verdicts), key=self._place)
        order += [replace(self._ranked(CompileOutcome(one)), late=late) for one in self.begun]
        order += [self._ranked(CompileOutcome(one)) for one in self.waiting]
        order.sort(key=lambda one: not one.fits)
        winner = order[0] if order and order[0].fits else None
        ranking = tuple(one.explained(winner, self.objective, self._assumed) for one in order)
        return SearchResult(
            str(self.surveys[0].formula.target), self.objective, self.config, ranking,
            losers=tuple(self._losers({one.estimate.choice: one for one in ranking})),
            counted=sum(survey.counted for survey in self.surveys),
            fitting=sum(survey.fitting for survey in self.surveys),
            stopped=self.stopped, unkept=self.unkept, seconds=seconds, assumed=self._assumed,
        )  # fmt: skip

    @property
    def _assumed(self) -> bool:
        return self.surveys[0].formula.is_assumed

    def _configured(self, estimate: Estimate) -> Config:
        return self._of[estimate.choice.devices].formula.space.configured(estimate.choice)

    def _target(self, estimate: Estimate) -> Target:
        return self._of[estimate.choice.devices].formula.target

    def _ranked(self, one: CompileOutcome) -> Ranked:
        config, target = self._configured(one.estimate), str(self._target(one.estimate))
        return Ranked(one.estimate, config, target, one.plan, one.cached, one.error)

    def _place(self, one: Ranked) -> tuple:
        choice = one.estimate.choice
        seconds = one.estimate.step_seconds if one.step_seconds is None else one.step_seconds
        return *value(self.objective, one.needs, seconds, choice.devices), choice.complexity

    def _losers(self, ranking: Mapping[Choice, Ranked]) -> Iterator[Loser]:
        """The best of every family by the formulas, but for those that the winner is of; all of them without one."""
        survey, model = self.surveys[0], self.config.model
        winner = next((one.estimate for one in ranking.values() if one.fits), None)
        own = set(families.families(winner.choice, survey.inside)) if winner else set()
        for family in families.names(survey.inside, survey.formula.space.devices, model.moe is not None):
            if family in own:
                continue
            best = survey.best_of(family)
            if best is None:
                yield Loser(family, None, survey.why_none(family))
            elif (known := ranking.get(best.choice)) and known.plan:
                yield Loser(family, best, f"compiled: {known.reason}")
            elif winner is None and best.fits():
                yield Loser(family, best, "fits by formula, but is not compiled")
            else:
                yield Loser(family, best, families.against(best, winner or best, self.objective, self._assumed))
