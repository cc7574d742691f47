"""History of a run, read from its directory: time accounting, attempts and how they ended, curves.

    metrics.jsonl   an object per logged step
    events.jsonl    start and resume begin an attempt; ledger: its time accounting so far; stop: why it ended; others
    launch.jsonl    of a supervisor, if any: starts and ends of generations, with causes

A running run is read like a killed one: up to its last complete line.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from jaxtrain.errors import UserError, escape_unprintable
from jaxtrain.io.figure import Displayed
from jaxtrain.io.jsonl import parse_record, read_records
from jaxtrain.trackers.files import EVENTS, METRICS
from jaxtrain.trackers.goodput import BUCKETS, LedgerWriter

LAUNCH = "launch.jsonl"
SAMPLED_BYTES = 8 << 20  # of metrics.jsonl, up to which every record is read
MOST_VALIDATIONS = 10_000  # above which every second one is read, and so on
DOWN = "down"
ALL_BUCKETS = {**BUCKETS, DOWN: "down: between processes, or not written before a kill"}
SILENT = 3 * LedgerWriter.MOST  # seconds without an event after which a run counts as killed
NAMED_KINDS = ("start", "resume", "compiled", "eval", "save", "copy", "stop", "ledger", "warning", "hang", "pipeline")
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """Attempt of a run: process 0 from its start to its last event.

    Args:
        began: Unix seconds.
        ended: Unix seconds.
        counted: Unix seconds until which `seconds` counts, by the clock of that time, which may have been set since.
        first: steps finished when it began.
        last: steps begun when it ended.
        elapsed: sum of `seconds`.
        seconds: seconds of each bucket of its ledger.
        reason: reason of its stop event; None: it has none.
        phase: its last recorded phase.
        cause: why it ended, in words; empty for the last attempt if unknown.
        generation: number of its generation, if known.
        processes: number of processes, if known.
        boot: name of the boot of its machine; empty if unknown.
        uptime: seconds of that machine when the attempt began, and until which `seconds` counts.
    """

    began: float
    ended: float
    counted: float
    first: int
    last: int
    elapsed: float
    seconds: Mapping[str, float]
    reason: str | None
    phase: str
    cause: str
    generation: int | None = None
    processes: int | None = None
    boot: str = ""
    uptime: tuple[float, float] = (0.0, 0.0)

    @property
    def is_finished(self) -> bool:
        """True if it did all steps of its config."""
        return self.reason == "finished"


@dataclass(frozen=True, repr=False)
class RunHistory(Displayed):
    """History of a run.

    Args:
        state: state of the run, in words.
        steps: steps that its config asks for.
        attempts: attempts in order; each but the first follows a restart.
        seconds: seconds of `ALL_BUCKETS` over all attempts; they sum to `elapsed`.
        metrics: records of metrics.jsonl; of a file above `SAMPLED_BYTES` evenly spaced ones, and validations.
        saves: save events.
        warnings: warnings and hangs.
        other_events: all other events.
        failed_generations: ends in launch.jsonl of generations without a start event of process 0.
    """

    name: str
    directory: Path
    state: str
    steps: int | None
    attempts: Sequence[Attempt]
    seconds: Mapping[str, float]
    elapsed: float
    metrics: Sequence[Event]
    saves: Sequence[Event]
    warnings: Sequence[Event]
    other_events: Sequence[Event]
    failed_generations: Sequence[Event] = ()
    entropy: float | None = None
    info: Event = field(default_factory=dict)

    @property
    def goodput(self) -> float | None:
        """Share of the time spent on training steps, without repeated ones, 0 to 1; None without a ledger."""
        return self.seconds["compute"] / self.elapsed if any(attempt.elapsed for attempt in self.attempts) else None

    @property
    def step(self) -> int:
        """Steps finished by the metrics, else begun."""
        begun = self.attempts[-1].last if self.attempts else 0
        return max((int(record["step"]) for record in self.metrics), default=begun)

    def series(self, key: str) -> list[tuple[int, float]]:
        """Returns (step, value) of a metric, by step; values may be nan or infinite."""
        values = {int(record["step"]): record[key] for record in self.metrics if record.get(key) is not None}
        return [(step, value) for step in sorted(values) if (value := _number(values[step])) is not None]

    def last(self, key: str) -> float | None:
        """Returns the latest value of a metric."""
        series = self.series(key)
        return series[-1][1] if series else None

    def median(self, key: str) -> float | None:
        """Returns the median of a metric over all steps."""
        values = [value for _, value in self.series(key)]
        return median(values) if values else None

    @property
    def unit(self) -> str:
        """Unit of the throughput: `tokens`, or `samples` of data that is no text."""
        return "tokens" if self.last("samples") is None else "samples"

    def throughput(self) -> float | None:
        """Returns tokens or samples per second of wall time, over all attempts."""
        total = self.last(self.unit)
        return None if total is None or not self.elapsed else total / self.elapsed

    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the series of all validation metrics."""
        names = dict.fromkeys(name for record in self.metrics for name in record if name.startswith("eval/"))
        return {name: self.series(name) for name in names}


def read_history(directory: Path, now: float | None = None) -> RunHistory:
    """Reads the history of a run directory.

    Args:
        directory: run directory.
        now: Unix seconds; default: the clock's.

    Raises:
        UserError: the directory is not a run.
    """
    events = [event for event in _objects(directory / EVENTS) if _time(event) is not None]
    metrics = [record for record in _sampled_metrics(directory / METRICS) if isinstance(record.get("step"), int)]
    if not any(event.get("kind") in ("start", "resume") for event in events):
        message = f"{directory}: not a run (no start event in {EVENTS})"
        raise UserError(f"{message}; expected the directory that `jaxtrain train` printed")
    launched = [event for event in _objects(directory / LAUNCH) if _time(event) is not None]
    attempts = _attempts(events, launched)
    seconds, elapsed = _bucket_seconds(attempts)
    infos = [event for event in events if event.get("kind") in ("start", "resume")]
    of = lambda *kinds: [event for event in events if event.get("kind") in kinds]  # noqa: E731
    return RunHistory(
        name=escape_unprintable(str(infos[-1].get("name") or directory.name)), directory=directory,
        state=_state(attempts[-1], time.time() if now is None else now), steps=_int(infos[-1].get("steps")),
        attempts=attempts, seconds=seconds, elapsed=elapsed, metrics=metrics, saves=of("save"),
        warnings=of("warning", "hang"),
        other_events=[event for event in events if event.get("kind") not in NAMED_KINDS],
        failed_generations=_failed_generations(launched, attempts),
        entropy=_number(infos[-1].get("unigram_entropy")), info=infos[-1],
    )  # fmt: skip


def as_dict(history: RunHistory) -> dict[str, Any]:
    """Returns the history for JSON, without the metrics, which have their own file."""
    attempts = [{**vars(attempt), "seconds": dict(attempt.seconds)} for attempt in history.attempts]
    rate = f"{history.unit}_per_sec"
    return {
        "name": history.name, "state": history.state, "step": history.step, "steps": history.steps,
        "elapsed": history.elapsed, "goodput": history.goodput, "seconds": dict(history.seconds), "attempts": attempts,
        "failed_generations": list(history.failed_generations), rate: history.throughput(),
        "median": {key: history.median(key) for key in (rate, "step_time", "data_wait", "mfu")},
        "last": {key: history.last(key) for key in ("loss", *history.scores())},
        "checkpoints": list(history.saves), "warnings": list(history.warnings), "events": list(history.other_events),
    }  # fmt: skip


def _attempts(events: Sequence[Event], launched: Sequence[Event]) -> list[Attempt]:
    starts = [at for at, event in enumerate(events) if event.get("kind") in ("start", "resume")]
    spans = [events[a:b] for a, b in zip(starts, [*starts[1:], len(events)])]
    return [_attempt(span, after[:1], launched) for span, after in zip(spans, [*spans[1:], []])]


def _attempt(span: Sequence[Event], following: Sequence[Event], launched: Sequence[Event]) -> Attempt:
    """Builds the attempt of a span of events; `following`: the first event of the next attempt, if any."""
    begin = span[0]
    records = [event for event in span if event.get("kind") == "ledger"]
    last = records[-1] if records else {}
    saved = last.get("seconds")
    seconds = {name: _number(saved.get(name)) or 0.0 for name in BUCKETS} if isinstance(saved, Mapping) else {}
    elapsed, age = sum(seconds.values()), _accounted(records[0]) if records else 0.0
    ended = max(_timestamp(event) for event in span)
    began = min(_timestamp(begin), _timestamp(records[0]) - age) if records else _timestamp(begin)
    counted = _timestamp(last) if records else began
    began_up = (_number(records[0].get("uptime")) or 0.0) - age if records else 0.0
    until = _timestamp(following[0]) if following else ended + SILENT
    reason = next((str(event.get("reason")) for event in reversed(span) if event.get("kind") == "stop"), None)
    ends, number = [e for e in launched if e.get("kind") == "end"], _int(begin.get("generation"))
    if number is None:  # of an older version
        ends = [e for e in ends if _timestamp(begin) <= _timestamp(e) <= until]
    else:
        ends = [e for e in ends if _int(e.get("generation")) == number]
    steps = [step for event in span if (step := _int(event.get("step"))) is not None]
    return Attempt(
        began, ended, counted, _int(begin.get("step")) or 0, max(steps, default=0), elapsed, seconds, reason,
        str(last.get("phase", "init")), _cause(span, reason, ends, bool(following)),
        _int(ends[0].get("generation")) if ends else None, _int(begin.get("processes")), str(last.get("boot", "")),
        (began_up, _number(last.get("uptime")) or 0.0),
    )  # fmt: skip


def _accounted(record: Event) -> float:
    """Returns the sum of the seconds of a ledger's record."""
    saved = record.get("seconds")
    return sum(_number(saved.get(name)) or 0.0 for name in BUCKETS) if isinstance(saved, Mapping) else 0.0


def _cause(span: Sequence[Event], reason: str | None, ends: Sequence[Event], has_next: bool) -> str:
    """Returns why an attempt ended, by its own events and by the supervisor."""
    hang = next((event for event in span if event.get("kind") == "hang"), None)
    cause = "" if reason is None else escape_unprintable(reason)
    if hang is not None:
        where = f"process {hang.get('process')} on {hang.get('host')}"
        cause = f"{where} hung in {hang.get('phase')}, see {hang.get('file')}"
    launched = escape_unprintable(str(ends[0].get("cause") or "")) if ends else ""
    if cause and launched and launched != cause:
        return f"{cause} ({launched})" if reason != "finished" else cause
    return cause or launched or ("killed" if has_next else "")


def _bucket_seconds(attempts: Sequence[Attempt]) -> tuple[dict[str, float], float]:
    """Returns (seconds of all buckets, their sum).

    Time that no ledger has, from the first start on, is `down`; not so between a finished run and its extension. The
    ledgers count by a clock that is never set, and so does the time between two attempts on one machine; Unix times are
    compared from one machine to another.
    """
    seconds = {name: sum(attempt.seconds.get(name, 0.0) for attempt in attempts) for name in BUCKETS}
    gaps = [uncounted_seconds(before, after) for before, after in pairwise(attempts)]
    seconds[DOWN] = sum(gaps) + max(0.0, attempts[-1].ended - attempts[-1].counted)
    return seconds, sum(seconds.values())


def uncounted_seconds(before: Attempt, after: Attempt) -> float:
    """Returns the seconds between two attempts that no ledger has."""
    if before.is_finished:
        gap = before.ended - before.counted
    elif before.boot and before.boot == after.boot:
        gap = after.uptime[0] - before.uptime[1]
    else:
        gap = after.began - before.counted
    return max(0.0, gap)


def _state(attempt: Attempt, now: float) -> str:
    if attempt.cause:
        return "finished" if attempt.is_finished else f"stopped: {attempt.cause}"
    silent = max(0.0, now - attempt.ended)
    if silent < SILENT:
        return f"running: {ALL_BUCKETS.get(attempt.phase, attempt.phase)}"
    return f"silent for {format_seconds(silent)}: killed, or its clock differs"


def _failed_generations(launched: Sequence[Event], attempts: Sequence[Attempt]) -> list[Event]:
    """Returns the ends of generations without a start event of process 0."""
    started = {attempt.generation for attempt in attempts}
    return [e for e in launched if e.get("kind") == "end" and _int(e.get("generation")) not in started]


def format_seconds(seconds: float) -> str:
    """Formats seconds as `42 s`, `12:34 min`, `5:06 h` or `3.2 days`."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"
    if seconds < 48 * 3600:
        return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02} h"
    return f"{seconds / 86400:.1f} days"


def _objects(path: Path) -> Iterable[dict[str, Any]]:
    return (record for _, record in read_records(path) if record is not None)


def _sampled_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns all records, or of a large file every n-th, those of validations and the last: plots show no more."""
    if not path.exists():
        return []
    stride, eval_stride, evals = max(1, path.stat().st_size // SAMPLED_BYTES), 1, 0
    kept, validations, last = {}, {}, (0, b"")  # by index
    with path.open("rb") as file:
        for index, line in enumerate(file):
            if not line.endswith(b"\n"):
                break  # it is being written
            if index % stride == 0:
                kept[index] = line
            elif b'"eval/' in line:
                evals += 1
                if evals % eval_stride == 0:
                    validations[index] = line
                if len(validations) > MOST_VALIDATIONS:
                    validations = dict(list(validations.items())[1::2])
                    eval_stride *= 2
            last = index, line
    lines = kept | validations | dict([last])
    return [record for index in sorted(lines) if (record := parse_record(lines[index])) is not None]


def _time(event: Event) -> float | None:
    """Returns Unix seconds; some events have them as a number."""
    value = event.get("time")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None


def _timestamp(event: Event) -> float:
    return _time(event) or 0.0


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    """Returns a float, also of `nan` and `inf` as text; None for anything else."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
