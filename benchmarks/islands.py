"""Islands over slow links: time to a loss, throughput, waiting, bytes and processor time of bsp, ssp, asp and diloco.

    python benchmarks/islands.py [--parts loss links scale slow] [--mbit 200] [--minutes N] --out islands.json

Four islands and a head, each with a network of its own and a Ray node of its own (islands_network.py, as root), at a
bridge. tc limits the speed of a link in both directions. Coordinator and servers are on the head, so that all that an
island pushes and reads crosses its link. Parts:

`loss`   wall time without validations until island 0 has the validation loss that all strategies reach, over links of
         `--mbit`; beside it the bytes that the link has carried and those that the islands log as `exchanged_bytes`
`links`  tokens/s against the speed of the links, of bsp and diloco; without a limit they are those of `scale`. Beside
         them `planned tokens/s`, as `jaxtrain plan` has them (`planned_tokens`)
`scale`  tokens/s, waiting, and processor seconds of the head per pushed GB, by number of islands and size of the model,
         without a limit
`slow`   tokens/s when each step takes 0.2 s besides its computation, and when one island takes 0.6 s, without a limit

Time begins when each island has done its first exchange, and ends when the first island has done its last one; for
`loss` it begins when each has done its first step. `waited` is the share of that time in which an island waits between
its push and its read. All islands and servers share the processor of one machine, so that without a limit more islands
make steps longer. `--out` keeps every run and is read again, so that a call goes on where the last one stopped.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import common
import islands_network

from jaxtrain.core.resolve import load_config
from jaxtrain.planning.islands import priced_strategies

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"embed": 128, "layers": 5, "mlp": 384, "heads": 4, "kv_heads": 2},
    "5M": {"embed": 256, "layers": 6, "mlp": 768, "heads": 4, "kv_heads": 2},
    "quick": {"embed": 32, "layers": 2, "mlp": 64, "heads": 2},
}
ROWS, SEQUENCE = 2, 64  # of a step of an island
EVERY = 16
SYNC: dict[str, dict[str, Any]] = {
    "bsp": {"strategy": "bsp"},
    "ssp": {"strategy": "ssp", "stale": {"bound": 3}},
    "asp": {"strategy": "asp"},
    "diloco": {"strategy": "diloco", "every": EVERY, "outer": {"lr": 0.8, "momentum": 0.5}},
}
RATE = {"bsp": 2e-3, "ssp": 1e-3, "asp": 1e-3, "diloco": 1e-3}
PARTS = ("loss", "links", "scale", "slow")
PACE, SLOW = 0.2, 3.0  # seconds of a step, and how many times that an island takes which is slow
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": f"{islands_network.ROOT}:{islands_network.ROOT / 'benchmarks'}",
}  # fmt: skip
TIMES = "times.jsonl"  # of islands_recorder.py
LIMIT = 900.0  # seconds of a run
POLL = 0.5


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        part: of the benchmark.
        way: strategy.
        steps: of each island.
        islands: their number.
        size: of the model.
        mbit: speed of the links, Mbit/s; None: no limit.
        pace: seconds that a step of each island takes besides its computation.
        validations: during the run.
    """

    part: str
    way: str
    steps: int
    islands: int = 4
    size: str = "1M"
    mbit: float | None = None
    pace: tuple[float, ...] = ()
    validations: int = 0

    @property
    def every(self) -> int:
        """Steps between exchanges."""
        return SYNC[self.way].get("every", 1)

    @property
    def key(self) -> dict[str, Any]:
        """The run as JSON has it."""
        return asdict(self) | {"pace": list(self.pace)}


RUN_KEYS = tuple(each.name for each in fields(Run))


@dataclass
class Seen:
    """What is known of a run.

    Attributes:
        steps: for each island the time of each step.
        validations: of each island: time, step, loss, seconds.
        samples: bytes over each link, processor seconds of the head, and the status of the coordinator, by time.
        exchanged: for each island the logged bytes of each step.
        pushed: time and bytes of each push.
    """

    steps: list[dict[int, float]]
    validations: list[list[dict[str, float]]]
    samples: list[dict[str, Any]]
    exchanged: list[dict[int, float]]
    pushed: list[tuple[float, float]] = field(default_factory=list)


def runs_of(part: str, mbit: float, quick: bool) -> list[Run]:
    """The runs of a part."""
    if quick:
        quick_run = Run(part, "bsp", 12, 2, "quick", mbit, (), 3)
        return [quick_run, Run(part, "diloco", 48, 2, "quick", mbit, (), 3)] if part == "loss" else []

    def planned(way: str, size: str = "1M", islands: int = 4, **more: Any) -> Run:
        rounds, steps = part_steps(part, size)
        return Run(part, way, rounds * EVERY if way == "diloco" else steps, islands, size, **more)

    if part == "loss":
        return [planned(way, mbit=mbit, validations=15) for way in SYNC]
    if part == "links":  # without a limit: see `scale`
        return [planned(way, mbit=speed) for speed in (mbit, mbit / 4, mbit * 4) for way in ("bsp", "diloco")]
    if part == "scale":
        return [
            planned(way, size, islands) for way in ("bsp", "diloco") for size in ("1M", "5M") for islands in (4, 2, 1)
        ]
    paces = ((PACE,) * 4, (PACE, PACE, PACE, SLOW * PACE))
    return [planned(way, pace=pace) for way in SYNC for pace in paces]


def part_steps(part: str, size: str) -> tuple[int, int]:
    """Rounds of diloco, and steps of the other strategies."""
    if part == "scale":
        return (6, 40) if size == "1M" else (4, 24)
    return {"loss": (60, 240), "links": (5, 24), "slow": (5, 40)}[part]


def settings_of(run: Run, folder: Path) -> dict[str, Any]:
    """The config of a run."""
    recorder = {"type": "islands_recorder:Recorder", "options": {"pace": list(run.pace)}}
    return {
        "name": "run", "dir": str(folder), "steps": run.steps, "precision": "fp32", "layout": "ddp",
        "mesh": {"data": 1}, "model": SIZES[run.size], "sync": SYNC[run.way], "islands": {"count": run.islands},
        "data": {
            "sources": [{"path": "stdlib"}], "sequence": SEQUENCE, "global_batch": ROWS * run.islands,
            "validation_fraction": 0.05,
        },
        "optimizer": {"lr": RATE[run.way]}, "schedule": {"name": "constant", "warmup_steps": 20},
        "eval": {"every": run.steps // max(run.validations, 1), "batches": 8 if run.validations else 1},
        "checkpoint": {"every": run.steps}, "callbacks": [recorder],
        "log": {"sample_tokens": 0, "tensorboard": False, "every": 1},
    }  # fmt: skip


def config_of(run: Run, folder: Path) -> Path:
    """Writes the config of a run."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(settings_of(run, folder)))
    return file


def measure(run: Run, net: islands_network.Network) -> dict[str, Any]:
    """Runs the islands once, each by a launcher on its machine."""
    from jaxtrain.launch.islands import IslandsOptions, open_run

    net.limit(run.mbit)
    with tempfile.TemporaryDirectory(prefix="islands", ignore_cleanup_errors=True) as folder:
        options = IslandsOptions(str(config_of(run, Path(folder))), (), None, None)
        _, directory, _ = open_run(options)
        command = [sys.executable, "-m", "jaxtrain.cli.main", "launch", "islands", str(directory)]
        command += ["--address", f"{islands_network.HEAD}:{islands_network.PORT}", "--max-restarts", "0"]
        launchers = [
            net.start(index, [*command, "--here", str(index)], Path(folder, f"{index}.log"))
            for index in range(run.islands)
        ]
        samples = list(watch(launchers, net, directory))
        for index, launcher in enumerate(launchers):
            if launcher.returncode:
                said = Path(folder, f"{index}.log").read_text()[-1500:]
                raise RuntimeError(f"launcher {index} ended with {launcher.returncode}:\n{said}")
        return run.key | figures(run, read(run, directory, samples))


def watch(
    launchers: Sequence[subprocess.Popen], net: islands_network.Network, directory: Path
) -> Iterator[dict[str, Any]]:
    """Yields samples until all launchers have ended."""
    until = time.monotonic() + LIMIT
    while any(launcher.poll() is None for launcher in launchers):
        failed = any(launcher.returncode for launcher in launchers)
        if failed or time.monotonic() > until:
            for launcher in launchers:
                launcher.kill()
                launcher.wait()
            if not failed:
                raise RuntimeError(f"not done after {LIMIT:.0f} s")
            return
        try:
            status = json.loads((directory / "server" / "status.json").read_text())["islands"]
        except OSError:
            status = {}
        waited = {int(index): island.get("waited", 0.0) for index, island in status.items()}
        yield {"time": time.time(), "links": net.sent(), "head": net.head_seconds(), "waited": waited}
        time.sleep(POLL)


def lines(file: Path) -> list[dict[str, Any]]:
    """Records of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def read(run: Run, directory: Path, samples: list[dict[str, Any]]) -> Seen:
    """What the folder of a run says."""
    folders = [directory / f"island-{index}" for index in range(run.islands)]
    times = [lines(folder / TIMES) for folder in folders]
    logged = [lines(folder / "metrics.jsonl") for folder in folders]
    pushes = [record for record in lines(directory / "server" / "pushes.jsonl") if record["event"] == "push"]
    return Seen(
        [{record["step"]: record["time"] for record in own if "loss" not in record} for own in times],
        [[record for record in own if "loss" in record] for own in times],
        samples,
        [{line["step"]: line.get("exchanged_bytes", 0.0) for line in own if "loss" in line} for own in logged],
        [(record["time"], record["bytes"]) for record in pushes],
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
    Ray, hosts and servers take for an exchange, which a plan does not count. The plan adds what the links take. Those
    of the islands are limited; what the head sends and receives passes no other limit.

    Args:
        run: over links.
        free: of the same strategy, islands and model without a limit.
    """
    if run["mbit"] is None or free is None:
        return None
    size, tokens = free["push_bytes"], ROWS * SEQUENCE  # in float32, gradients and parameters are of one size
    config = load_config(settings_of(Run(**{key: run[key] for key in RUN_KEYS}), Path()), paths=False, checks=())
    own, *_ = priced_strategies(
        config, {"gradients": size, "params": size, "mutable": 0}, tokens=tokens,
        seconds=run["islands"] * tokens / free["tokens_per_second"], rate=run["mbit"] * 1e6 / 8, server_rate=math.inf,
    )  # fmt: skip
    return own.tokens_per_second


def link_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Table of `links`."""
    free = {run["way"]: run for run in runs if run["mbit"] is None}
    rows = []
    for run in runs:
        found, planned = run["tokens_per_second"], planned_tokens(run, free.get(run["way"]))
        rows.append({
            "way": run["way"], "Mbit/s": run["mbit"], "tokens/s": found, "planned tokens/s": planned,
            "planned/found": None if planned is None else planned / found, "step s": run["step_seconds"][0],
            "waited": _mean(run["waited"]), "link busy": _busy(run),
        })  # fmt: skip
    return rows


def scale_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Table of `scale`."""
    rows = []
    for run in runs:
        head, gb = run["head_seconds"], max(run["pushed_bytes"], 1) / 1e9
        rows.append({
            "way": run["way"], "size": run["size"], "islands": run["islands"], "push MB": run["push_bytes"] / 1e6,
            "tokens/s": run["tokens_per_second"], "step s": run["step_seconds"][0], "waited": _mean(run["waited"]),
            "coordinator cpu s/GB": head["coordinator"] / gb, "servers cpu s/GB": head["servers"] / gb,
            "ray of head cpu s/GB": head["ray"] / gb,
        })  # fmt: skip
    return rows


def slow_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Table of `slow`: one row for each strategy, with and without the slow island."""
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        own = {len(set(run["pace"])) > 1: run for run in runs if run["way"] == way}
        if len(own) < 2:
            continue
        even, uneven = own[False], own[True]
        rows.append({
            "way": way, "tokens/s": even["tokens_per_second"], "tokens/s with slow": uneven["tokens_per_second"],
            "left": uneven["tokens_per_second"] / even["tokens_per_second"],
            "step s": _mean(even["step_seconds"]), "step s of others": _mean(uneven["step_seconds"][:-1]),
            "step s of slow": uneven["step_seconds"][-1], "waited": _mean(even["waited"]),
            "waited of others": _mean(uneven["waited"][:-1]), "waited of slow": uneven["waited"][-1],
        })  # fmt: skip
    return rows


ROWS_OF = {"loss": loss_rows, "links": link_rows, "scale": scale_rows, "slow": slow_rows}


def tables(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The tables of all parts that have runs."""
    by_part = {part: [run for run in runs if run["part"] == part] for part in PARTS}
    by_part["links"] += [run for run in by_part["scale"] if (run["size"], run["islands"]) == ("1M", 4)]
    by_part["links"].sort(key=lambda run: (run["way"], run["mbit"] or math.inf))
    by_part["scale"].sort(key=lambda run: (run["way"], run["size"], run["islands"]))
    return {part: ROWS_OF[part](own) for part, own in by_part.items() if own}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mbit", type=float, default=200.0, help="speed of the links of `loss`")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    about = common.machine("ray")
    print(common.title(about))
    runs = json.loads(args.out.read_text())["results"]["runs"] if args.out and args.out.exists() else []
    planned = [run for part in args.parts for run in runs_of(part, args.mbit, args.quick)]
    missing = [run for run in planned if not any(run.key.items() <= known.items() for known in runs)]
    end = time.monotonic() + 60 * args.minutes
    if missing:
        with islands_network.network(max(run.islands for run in missing), ENVIRONMENT) as net:
            for run in missing:
                if time.monotonic() > end:
                    break
                begun = time.monotonic()
                runs.append(measure(run, net))
                said = f"{runs[-1]['tokens_per_second']:,.0f} tokens/s, {time.monotonic() - begun:.0f} s in all"
                print(
                    f"{run.part} {run.way} {run.size} {run.islands} islands {run.mbit} {run.pace}: {said}", flush=True
                )
                common.report("islands", args, {"tables": tables(runs), "runs": runs}, about)
    for part, rows in tables(runs).items():
        print(f"{part}\n{common.table(rows)}")
    common.report("islands", args, {"tables": tables(runs), "runs": runs}, about)


if __name__ == "__main__":
    main()
