"""The whole life of a run, read from its folder: where its time went, how it ended each time, its curves. No JAX.

    metrics.jsonl   an object per logged step
    events.jsonl    start and resume begin a life; ledger: where its time went so far; stop: why it ended; and others
    launch.jsonl    of a supervisor, if there is one: starts and ends of generations, with causes

A run that goes on right now is read as one that is dead: up to its last word, the end of a line perhaps missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from jaxtrain.errors import UserError, clean
from jaxtrain.io.jsonl import read_lines
from jaxtrain.trackers.files import EVENTS, METRICS
from jaxtrain.trackers.goodput import BUCKETS, LedgerWriter

LAUNCH = "launch.jsonl"
DOWN = "down"
ALL = {**BUCKETS, DOWN: "down: between processes, or not written before a kill"}
SILENT = 3 * LedgerWriter.MOST  # seconds after which a run that says nothing is taken for dead
OWN = ("start", "resume", "compiled", "eval", "save", "copy", "stop", "ledger", "warning", "hang", "pipeline")
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One process 0, from its start to its last word.

    Args:
        began, ended: Unix seconds.
        first, last: steps done when it began, and begun when it ended.
        seconds: of the buckets of its ledger; `elapsed` is their sum.
        reason: that its stop event gives; None: it said nothing.
        phase: that it was in when it last said so.
        cause: why it ended, in words; empty while it is the last and said nothing.
        generation, processes: where they are known.
    """

    began: float
    ended: float
    first: int
    last: int
    elapsed: float
    seconds: Mapping[str, float]
    reason: str | None
    phase: str
    cause: str
    generation: int | None = None
    processes: int | None = None


@dataclass(frozen=True)
class RunHistory:
    """What is known of a run.

    Args:
        state: how it stands, in words.
        steps: that its config asks for.
        lives: in order; a restart lies before each but the first.
        seconds: of `ALL` buckets over the whole life; they add up to `elapsed`.
        metrics: records of metrics.jsonl.
        saves, warnings, others: events of these kinds, hangs among the warnings.
        failed: generations that ended before a process 0 said anything: launch.jsonl's ends.
    """

    name: str
    directory: Path
    state: str
    steps: int | None
    lives: Sequence[Attempt]
    seconds: Mapping[str, float]
    elapsed: float
    metrics: Sequence[Event]
    saves: Sequence[Event]
    warnings: Sequence[Event]
    others: Sequence[Event]
    failed: Sequence[Event] = ()
    entropy: float | None = None
    info: Event = field(default_factory=dict)

    @property
    def goodput(self) -> float | None:
        """Share of the time in training steps that count, 0 to 1; None where no ledger was written."""
        return self.seconds["compute"] / self.elapsed if any(life.elapsed for life in self.lives) else None

    @property
    def step(self) -> int:
        """Steps done, as far as the metrics tell, or begun."""
        return max((int(record["step"]) for record in self.metrics), default=self.lives[-1].last if self.lives else 0)

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, by step; values may be nan or infinite."""
        found = {int(record["step"]): record[key] for record in self.metrics if record.get(key) is not None}
        return [(step, value) for step in sorted(found) if (value := _number(found[step])) is not None]

    def last(self, key: str) -> float | None:
        """The latest value of a metric."""
        found = self.series(key)
        return found[-1][1] if found else None

    def median(self, key: str) -> float | None:
        """The median of a metric over all steps."""
        found = [value for _, value in self.series(key)]
        return median(found) if found else None

    def throughput(self) -> float | None:
        """Tokens a second over the whole life, with all that was no training."""
        tokens = self.last("tokens")
        return None if tokens is None or not self.elapsed else tokens / self.elapsed

    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """Series of all validation metrics."""
        names = dict.fromkeys(name for record in self.metrics for name in record if name.startswith("eval/"))
        return {name: self.series(name) for name in names}


def read(directory: Path, now: float | None = None) -> RunHistory:
    """The history of a run's folder.

    Args:
        now: Unix seconds; default: the clock's.

    Raises:
        UserError: the folder holds no run.
    """
    events = [event for event in _objects(directory / EVENTS) if _time(event) is not None]
    metrics = [record for record in _objects(directory / METRICS) if isinstance(record.get("step"), int)]
    if not any(event.get("kind") in ("start", "resume") for event in events):
        message = f"{directory}: not a run (no {EVENTS} that tells of a start)"
        raise UserError(f"{message}; expected the folder that `jaxtrain train` printed")
    launched = [event for event in _objects(directory / LAUNCH) if _time(event) is not None]
    lives = _lives(events, launched)
    seconds, elapsed = _accounts(lives)
    infos = [event for event in events if event.get("kind") in ("start", "resume")]
    of = lambda *kinds: [event for event in events if event.get("kind") in kinds]  # noqa: E731
    return RunHistory(
        name=clean(str(infos[-1].get("name") or directory.name)), directory=directory,
        state=_state(lives[-1], time.time() if now is None else now), steps=_whole(infos[-1].get("steps")),
        lives=lives, seconds=seconds, elapsed=elapsed, metrics=metrics, saves=of("save"),
        warnings=of("warning", "hang"), others=[event for event in events if event.get("kind") not in OWN],
        failed=_unheard(launched, lives), entropy=_number(infos[-1].get("unigram_entropy")), info=infos[-1],
    )  # fmt: skip


def as_dict(history: RunHistory) -> dict[str, Any]:
    """The history as JSON has it, without the metrics, which are in their own file."""
    lives = [{**vars(life), "seconds": dict(life.seconds)} for life in history.lives]
    return {
        "name": history.name, "state": history.state, "step": history.step, "steps": history.steps,
        "elapsed": history.elapsed, "goodput": history.goodput, "seconds": dict(history.seconds), "lives": lives,
        "failed_generations": list(history.failed), "tokens_per_sec": history.throughput(),
        "median": {key: history.median(key) for key in ("tokens_per_sec", "step_time", "data_wait", "mfu")},
        "last": {key: history.last(key) for key in ("loss", *history.scores())},
        "checkpoints": list(history.saves), "warnings": list(history.warnings), "events": list(history.others),
    }  # fmt: skip


def _lives(events: Sequence[Event], launched: Sequence[Event]) -> list[Attempt]:
    starts = [at for at, event in enumerate(events) if event.get("kind") in ("start", "resume")]
    spans = [events[a:b] for a, b in zip(starts, [*starts[1:], len(events)])]
    return [_life(span, after[:1], launched) for span, after in zip(spans, [*spans[1:], []])]


def _life(span: Sequence[Event], following: Sequence[Event], launched: Sequence[Event]) -> Attempt:
    """The life of some events; `following`: the first of the next one, if there is one."""
    begin = span[0]
    records = [event for event in span if event.get("kind") == "ledger"]
    last = records[-1] if records else {}
    held = last.get("seconds")
    seconds = {name: _number(held.get(name)) or 0.0 for name in BUCKETS} if isinstance(held, Mapping) else {}
    elapsed = sum(seconds.values())
    ended = max(_at(event) for event in span)
    began = min(_at(begin), _at(last) - elapsed) if records else _at(begin)
    until = _at(following[0]) if following else ended + SILENT
    reason = next((str(event.get("reason")) for event in reversed(span) if event.get("kind") == "stop"), None)
    ends = [e for e in launched if e.get("kind") == "end" and _at(begin) <= _at(e) <= until][:1]  # the first is its own
    steps = [step for event in span if (step := _whole(event.get("step"))) is not None]
    return Attempt(
        began, ended, _whole(begin.get("step")) or 0, max(steps, default=0), elapsed, seconds, reason,
        str(last.get("phase", "init")), _cause(span, reason, ends, bool(following)),
        _whole(ends[0].get("generation")) if ends else None, _whole(begin.get("processes")),
    )  # fmt: skip


def _cause(span: Sequence[Event], reason: str | None, ends: Sequence[Event], has_next: bool) -> str:
    """The run's own word, and that of who watched it from outside."""
    hang = next((event for event in span if event.get("kind") == "hang"), None)
    own = "" if reason is None else clean(reason)
    if hang is not None:
        own = f"process {hang.get('process')} on {hang.get('host')} hung in {hang.get('phase')}, see {hang.get('file')}"
    outside = clean(str(ends[0].get("cause") or "")) if ends else ""
    if own and outside and outside != own:
        return f"{own} ({outside})" if reason != "finished" else own
    return own or outside or ("killed without a word" if has_next else "")


def _accounts(lives: Sequence[Attempt]) -> tuple[dict[str, float], float]:
    """(seconds of all buckets, their sum): what no ledger holds between the first start and the last word is `down`."""
    seconds = {name: sum(life.seconds.get(name, 0.0) for life in lives) for name in BUCKETS}
    whole = max(life.ended for life in lives) - lives[0].began
    seconds[DOWN] = max(0.0, whole - sum(seconds.values()))
    return seconds, sum(seconds.values())


def _state(life: Attempt, now: float) -> str:
    if life.cause:
        return "finished" if life.reason == "finished" else f"stopped: {life.cause}"
    silent = max(0.0, now - life.ended)
    if silent < SILENT:
        return f"running: {ALL.get(life.phase, life.phase)}"
    return f"silent for {format_seconds(silent)}: killed, or on another clock"


def _unheard(launched: Sequence[Event], lives: Sequence[Attempt]) -> list[Event]:
    """Ends of generations within which no process 0 told of a start."""
    heard = {life.generation for life in lives}
    return [e for e in launched if e.get("kind") == "end" and _whole(e.get("generation")) not in heard]


def format_seconds(seconds: float) -> str:
    """`42 s`, `12:34 min`, `5:06 h` or `3.2 days`."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"
    if seconds < 48 * 3600:
        return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02} h"
    return f"{seconds / 86400:.1f} days"


def _objects(path: Path) -> Iterable[dict[str, Any]]:
    return (record for _, record in read_lines(path) if record is not None)


def _time(event: Event) -> float | None:
    """Unix seconds; events of others may count seconds themselves."""
    value = event.get("time")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None


def _at(event: Event) -> float:
    return _time(event) or 0.0


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    """A float; what is not finite is written as text."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
