"""What the short strings of `guard` and `faults` mean. No JAX.

guard: [skip@6]               no update by batches whose loss or gradient norm is 6 robust deviations above the last
guard: [rollback@6:100:200]   training goes back 100 steps or more and passes over 200 batches, the spike amid them
guard: [check@100]            every 100th step is computed twice, and replicas are compared

faults: [kill@12, kill@save:8, hang@data:5/1, nan@5]    KIND@[PLACE:]STEP[/PROCESS], for tests of recovery
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jaxtrain.errors import did_you_mean, join, shown

BACK, OVER = 100, 200  # as for PaLM (Chowdhery et al. 2022, arXiv 2204.02311, 5.1)
STEP, SAVE, COMMIT, COMMITTED, LOGGED, DATA, EVAL = "step", "save", "commit", "committed", "logged", "data", "eval"
ANYWHERE = (STEP, SAVE, COMMIT, COMMITTED, LOGGED, DATA, EVAL)
PLACES: dict[str, tuple[str, ...]] = {  # the first is meant where none is given
    "kill": ANYWHERE, "stop": ANYWHERE, "hang": ANYWHERE, "slow_disk": (SAVE,), "full_disk": (SAVE,),
    "corrupt": (COMMITTED,), "nan": (STEP,), "flip": (STEP,),
}  # fmt: skip
_FAULT = re.compile(r"([a-z_]+)@(?:([a-z]+):)?([1-9][0-9]{0,9})(?:/([0-9]{1,5}))?", re.ASCII)
_SPIKES = re.compile(r"(skip|rollback)@([0-9]+(?:\.[0-9]+)?)(?::([0-9]{1,9}):([1-9][0-9]{0,8}))?", re.ASCII)
_CHECK = re.compile(r"check@([1-9][0-9]{0,8})", re.ASCII)


@dataclass(frozen=True)
class Spikes:
    """What is done about a spike: `action` is skip or rollback.

    threshold: robust z-score above which a loss or gradient norm is one. back: steps a rollback goes back at least.
    over: batches it then passes over.
    """

    action: str
    threshold: float
    back: int = BACK
    over: int = OVER

    @property
    def skips(self) -> bool:
        """Whether the step itself leaves the update out."""
        return self.action == "skip"


@dataclass(frozen=True)
class Guard:
    """The meaning of `guard`. check: steps between checks for silent corruption."""

    spikes: Spikes | None = None
    check: int | None = None


@dataclass(frozen=True)
class Fault:
    """One of `faults`: `kind` happens at `place` of a step (of finished steps, that one included) in one process."""

    text: str
    kind: str
    place: str
    step: int
    process: int = 0


def guard(texts: Iterable[str]) -> Guard:
    """The meaning of `guard`. Raises ValueError, saying what is wrong and what would be right."""
    spikes, check = None, None
    for text in texts:
        found, checks = _SPIKES.fullmatch(text), _CHECK.fullmatch(text)
        if checks and check is None:
            check = int(checks[1])
        elif found and spikes is None:
            spikes = _spikes(text, found)
        elif checks or found:
            raise ValueError(f"{shown(text)} is the second of its kind; expected one of skip and rollback, one check")
        else:
            kinds = ("skip", "rollback", "check")
            hint = did_you_mean(text.partition("@")[0], kinds)
            forms = "skip@Z, rollback@Z, rollback@Z:BACK:BATCHES or check@STEPS, such as skip@6"
            raise ValueError(f"expected {forms}; found {shown(text)}{hint}")
    return Guard(spikes, check)


def _spikes(text: str, found: re.Match) -> Spikes:
    action, threshold = found[1], float(found[2])
    if threshold < 1:
        raise ValueError(f"{shown(text)}: a z-score of {threshold:g} is everyday; expected at least 1, such as 6")
    if found[3] is None:
        return Spikes(action, threshold)
    if action == "skip":
        raise ValueError(f"{shown(text)}: a skip goes nowhere; expected skip@{found[2]}, or rollback@...")
    return Spikes(action, threshold, int(found[3]), int(found[4]))


def fault(text: str) -> Fault:
    """The meaning of one of `faults`. Raises ValueError, saying what is wrong and what would be right."""
    found = _FAULT.fullmatch(text)
    if found is None:
        raise ValueError(f"expected KIND@[PLACE:]STEP[/PROCESS] such as kill@12 or kill@save:8/1; found {shown(text)}")
    kind, place, step, process = found.groups()
    if kind not in PLACES:
        raise ValueError(f"{shown(text)}: no kind `{kind}`; expected {join(PLACES)}{did_you_mean(kind, PLACES)}")
    if place is not None and place not in PLACES[kind]:
        hint = did_you_mean(place, PLACES[kind])
        raise ValueError(f"{shown(text)}: {kind} has no place `{place}`; expected {join(PLACES[kind])}{hint}")
    return Fault(text, kind, place or PLACES[kind][0], int(step), int(process or 0))
