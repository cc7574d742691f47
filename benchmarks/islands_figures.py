"""Figures and tables of benchmarks/islands.py, of what the folder of a run and the samples beside it say."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from islands_runs import FEW_BITS, PARTS, ROWS, SEQUENCE, Run, run_of, settings_of, with_defaults

from jaxtrain.core.resolve import load_config
from jaxtrain.planning.islands import priced_strategies

TIMES = "times.jsonl"  # of islands_recorder.py
POLL = 0.5  # seconds between samples
EVENTS = ("join", "leave", "late")  # of a coordinator's log


@dataclass
class Seen:
    """What is known of a run.

    Attributes:
        steps: for each island the time of each step.
        validations: of each island: time, step, loss, seconds.
        samples: bytes over each link, processor seconds of the head, and the status of the coordinator, by time.
        exchanged: for each island the logged bytes of each step.
        pushed: time and bytes of each push; none without a server.
        events: how often islands came, left, and were late, by name.
    """

    steps: list[dict[int, float]]
    validations: list[list[dict[str, float]]]
    samples: list[dict[str, Any]]
    exchanged: list[dict[int, float]]
    pushed: list[tuple[float, float]] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)


def lines(file: Path) -> list[dict[str, Any]]:
    """Records of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def read(run: Run, directory: Path, samples: list[dict[str, Any]]) -> Seen:
    """What the folder of a run says."""
    folders = [directory / f"island-{index}" for index in range(run.islands)]
    times = [lines(folder / TIMES) for folder in folders]
    logged = [lines(folder / "metrics.jsonl") for folder in folders]
    log = lines(directory / "server" / "pushes.jsonl")
    return Seen(
        [{record["step"]: record["time"] for record in own if "loss" not in record} for own in times],
        [[record for record in own if "loss" in record] for own in times],
        samples,
        [{line["step"]: line.get("exchanged_bytes", 0.0) for line in own if "loss" in line} for own in logged],
        [(record["time"], record["bytes"]) for record in log if record["event"] == "push" and "bytes" in record],
        dict(Counter(record["event"] for record in log if record["event"] in EVENTS)),
    )


def between(samples: Sequence[Mapping[str, Any]], begin: float, end: float) -> tuple[Any, Any]:
    """The samples that are nearest to two times."""
    first, last = (min(samples, key=lambda sample: abs(sample["time"] - at)) for at in (begin, end))
    return first, last


def figures(run: Run, seen: Seen) -> dict[str, Any]:
    """Figures of a run, over the time in which all islands train."""
    begin = max(steps[run.every] for steps in seen.steps)
    end = min(max(steps.values()) for steps in seen.steps)
    validated = sum(v["seconds"] for v in seen.validations[0] if begin < v["time"] < end)
    done = [sum(begin < at <= end for at in steps.values()) for steps in seen.steps]
    first, last = between(seen.samples, begin, end)
    seconds, window = end - begin - validated, max(last["time"] - first["time"], POLL)
    pushed = sum(size for at, size in seen.pushed if first["time"] < at <= last["time"])
    head = {part: last["head"][part] - first["head"][part] for part in first["head"]}
    links = [[y - x for x, y in zip(a, b)] for a, b in zip(first["links"], last["links"])][: run.islands]
    logged = sum(
        size for steps, sizes in zip(seen.steps, seen.exchanged) for step, size in sizes.items()
        if step in steps and first["time"] < steps[step] <= last["time"]
    )  # fmt: skip
    waited = [last["waited"].get(i, 0.0) - first["waited"].get(i, 0.0) for i in range(run.islands)]
    return {
        "seconds": seconds, "validated": validated, "steps_done": done,
        "tokens_per_second": sum(done) * ROWS * SEQUENCE / seconds,
        "step_seconds": [seconds / max(count, 1) for count in done],
        "waited": [each / window for each in waited],
        "window": window, "sent_bytes": sum(sent for sent, _ in links), "received_bytes": sum(got for _, got in links),
        "exchanged_bytes": logged, "pushed_bytes": pushed,
        "push_bytes": max((size for _, size in seen.pushed), default=0), "head_seconds": head, "curve": curve(seen),
        "final": [own[-1]["loss"] if own else None for own in seen.validations], "events": seen.events,
    }  # fmt: skip


def curve(seen: Seen) -> list[tuple[float, int, float]]:
    """Seconds without validations, steps and loss of island 0, from the time at which each has done a step."""
    begin = max(min(steps.values()) for steps in seen.steps)
    points, validated = [], 0.0
    for validation in seen.validations[0]:
        validated += validation["seconds"]
        points.append((validation["time"] - begin - validated, int(validation["step"]), validation["loss"]))
    return points


def time_to(points: Sequence[Sequence[float]], loss: float) -> float | None:
    """Seconds until a curve is at a loss, on the line between two validations; None if it does not get there."""
    before: Sequence[float] | None = None
    for point in points:
        if point[2] <= loss:
            if before is None or before[2] <= point[2]:
                return point[0]
            share = (before[2] - loss) / (before[2] - point[2])
            return before[0] + share * (point[0] - before[0])
        before = point
    return None


def reached(runs: Sequence[Mapping[str, Any]]) -> float:
    """The lowest loss that all runs reach."""
    return max(min(point[2] for point in run["curve"]) for run in runs)


def loss_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Table of `loss`."""
    target = reached(runs)
    return [
        {
            "way": run["way"], "to loss": round(target, 3), "seconds": time_to(run["curve"], target),
            "best": round(min(point[2] for point in run["curve"]), 3), "tokens/s": run["tokens_per_second"],
            "step s": run["step_seconds"][0], "waited": _mean(run["waited"]), "link busy": _busy(run),
            "link sent MB": run["sent_bytes"] / 1e6, "logged MB": run["exchanged_bytes"] / 1e6,
            "link received MB": run["received_bytes"] / 1e6,
        }
        for run in runs
    ]  # fmt: skip


def disturbed_rows(runs: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Table of `lossy` and `cut`: beside each way the same without losses and cuts, to one loss.

    `lowest` is the lowest loss that both runs of a way reach, and `lowest times` how many times the time to it; a way
    that reaches the loss of all before its link is cut differs there alone.

    Args:
        runs: of the part.
        plain: those without.
    """
    if not runs:
        return []
    of_way = {run["way"]: run for run in plain if run["way"] in {other["way"] for other in runs}}
    target = reached([*runs, *of_way.values()])
    rows = []
    for run in runs:
        other = of_way.get(run["way"])
        before = None if other is None else time_to(other["curve"], target)
        seconds, final = time_to(run["curve"], target), [loss for loss in run["final"] if loss is not None]
        lowest = reached([run, run if other is None else other])
        times = None if other is None else time_to(run["curve"], lowest) / time_to(other["curve"], lowest)
        rows.append({
            "way": run["way"], "to loss": round(target, 3), "seconds": seconds, "undisturbed": before,
            "times": seconds / before if seconds and before else None, "lowest": round(lowest, 3),
            "lowest seconds": time_to(run["curve"], lowest), "lowest times": times, "final": final[0],
            "final undisturbed": None if other is None else other["curve"][-1][2],
            "apart": max(final) - min(final), "tokens/s": run["tokens_per_second"],
            "waited": _mean(run["waited"]), "link busy": _busy(run), "link sent MB": run["sent_bytes"] / 1e6,
            **{event: run["events"].get(event, 0) for event in EVENTS},
        })  # fmt: skip
    return rows


def _busy(run: Mapping[str, Any]) -> float | None:
    """Share of the time in which a link carries, in one direction or the other; None without a limit."""
    carried = (run["sent_bytes"] + run["received_bytes"]) / run["islands"]
    return None if run["mbit"] is None else carried / (run["mbit"] * 1e6 / 8) / run["window"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def planned_tokens(run: Mapping[str, Any], free: Mapping[str, Any] | None) -> float | None:
    """Tokens/s that `jaxtrain plan` expects of a run over links; None without a limit, or nothing to plan from.

    The plan is told nothing of the run itself, nor of another one over limited links. All that is measured is the step
    of the same strategy without a limit, with as many islands on the same processor. That has the computation, and what
    Ray, hosts and servers take for an exchange, which a plan does not count. The plan adds what the links take: those
    of the islands, and that of the head if it is limited, which a plan assumes unless it is told of a faster one.

    Args:
        run: over links.
        free: of the same strategy, islands and model without a limit.
    """
    if run["mbit"] is None or free is None:
        return None
    size, tokens = free["push_bytes"], ROWS * SEQUENCE  # in float32, gradients and parameters are of one size
    config = load_config(settings_of(run_of(run), Path()), paths=False, checks=())
    head = math.inf if run["head_mbit"] is None else run["head_mbit"] * 1e6 / 8
    own, *_ = priced_strategies(
        config, {"gradients": size, "params": size, "mutable": 0}, tokens=tokens,
        seconds=run["islands"] * tokens / free["tokens_per_second"], rate=run["mbit"] * 1e6 / 8, server_rate=head,
    )  # fmt: skip
    return own.tokens_per_second


def link_rows(
    runs: Sequence[Mapping[str, Any]], free: Sequence[Mapping[str, Any]], shows_free: bool = True
) -> list[dict[str, Any]]:
    """Table of `links` and `head`.

    Args:
        runs: over links.
        free: without a limit, one of each way.
        shows_free: as rows, too.
    """
    of_way = {run["way"]: run for run in free}
    both = sorted([*runs, *(free if shows_free else ())], key=lambda run: (run["way"], run["mbit"] or math.inf))
    rows = []
    for run in both:
        found, planned = run["tokens_per_second"], planned_tokens(run, of_way.get(run["way"]))
        rows.append({
            "way": run["way"], "Mbit/s": run["mbit"], "tokens/s": found, "planned tokens/s": planned,
            "planned/found": None if planned is None else planned / found, "step s": run["step_seconds"][0],
            "waited": _mean(run["waited"]), "link busy": _busy(run),
        })  # fmt: skip
    return rows


def scale_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Table of `scale`: processor seconds of the head per GB as it was pushed, and per GB of the same in float32."""
    raw = {run["size"]: run["push_bytes"] for run in runs if run["way"] not in FEW_BITS}
    rows = []
    for run in runs:
        head, gb = run["head_seconds"], max(run["pushed_bytes"], 1) / 1e9
        float32 = raw.get(run["size"])
        rows.append({
            "way": run["way"], "size": run["size"], "islands": run["islands"], "push MB": run["push_bytes"] / 1e6,
            "tokens/s": run["tokens_per_second"], "step s": run["step_seconds"][0], "waited": _mean(run["waited"]),
            "coordinator cpu s/GB": head["coordinator"] / gb, "servers cpu s/GB": head["servers"] / gb,
            "ray of head cpu s/GB": head["ray"] / gb,
            "head cpu s/float32 GB": float32 and sum(head.values()) / gb * run["push_bytes"] / float32,
        })  # fmt: skip
    return rows


def slow_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Table of `slow`: one row for each strategy, with and without the slow island, and the times to one loss."""
    if not runs:
        return []
    target, rows = reached(runs), []
    for way in dict.fromkeys(run["way"] for run in runs):
        own = {len(set(run["pace"])) > 1: run for run in runs if run["way"] == way}
        if len(own) < 2:
            continue
        even, uneven = own[False], own[True]
        seconds, later = time_to(even["curve"], target), time_to(uneven["curve"], target)
        rows.append({
            "way": way, "to loss": round(target, 3), "seconds": seconds, "seconds with slow": later,
            "times": later / seconds, "tokens/s": even["tokens_per_second"],
            "tokens/s with slow": uneven["tokens_per_second"],
            "left": uneven["tokens_per_second"] / even["tokens_per_second"],
            "step s": _mean(even["step_seconds"]), "step s of others": _mean(uneven["step_seconds"][:-1]),
            "step s of slow": uneven["step_seconds"][-1], "waited": _mean(even["waited"]),
            "waited of others": _mean(uneven["waited"][:-1]), "waited of slow": uneven["waited"][-1],
        })  # fmt: skip
    return rows


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The tables of all parts that have runs, and one of the runs that failed."""
    runs = [with_defaults(record) for record in records]
    failed = [run for run in runs if "error" in run]
    of: dict[str, list[dict[str, Any]]] = {
        part: [run for run in runs if run["part"] == part and "error" not in run] for part in PARTS
    }
    free = [run for run in of["scale"] if (run["size"], run["islands"]) == ("1M", 4) and run["way"] not in FEW_BITS]
    of["scale"].sort(key=lambda run: (run["way"], run["size"], run["islands"]))
    made = {
        "loss": loss_rows(of["loss"]) if of["loss"] else [], "links": link_rows(of["links"], free),
        "head": link_rows(of["head"], free, False), "scale": scale_rows(of["scale"]), "slow": slow_rows(of["slow"]),
        "lossy": disturbed_rows(*([run for run in of["lossy"] if bool(run["lost"]) == lost] for lost in (True, False))),
        "cut": disturbed_rows(of["cut"], of["loss"]),
        "long_cut": [
            {"way": run["way"], "cut s": run["cut"], "joins": run["events"]["join"], "losses": run["final"]}
            for run in of["long_cut"]
        ],
        "failed": [
            {**{key: run[key] for key in ("part", "way", "size", "islands")}, "error": run["error"].splitlines()[0]}
            for run in failed
        ],
    }  # fmt: skip
    return {part: rows for part, rows in made.items() if rows}
