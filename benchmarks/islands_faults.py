"""Kills, stops and delays islands of `diloco`, and compares the loss that they end with with that of undisturbed ones.

    python benchmarks/islands_faults.py [--seed 0] [--schedules 10] [--only NAME ...] [--minutes N] --out faults.json

Every run is a real `jaxtrain launch islands` of four islands, a small decoder on the source files of Python's standard
library. What happens to it comes when the islands have agreed on a drawn step, and a drawn part of a round later:

`worker`  SIGKILL of an island's process, which the launcher starts again
`server`  SIGKILL of the server's process, which Ray starts again
`stop`    SIGSTOP of an island's process, and SIGCONT after 30 s
`late`    the launcher of island 3 is started only then. Such a run has a Ray cluster of its own with a launcher of
          islands 0 to 2 and one of island 3, as on several machines, and `islands.quorum=3` with a long grace: three
          begin, and later wait for all that are there

Each of them is a case of its own, and each of `schedule-0` ... has two to four of them, drawn by `--seed`. A run must
end with exit code 0 and without processes left; every push that the server has acknowledged must be part of an update;
and the validation loss of each island must be within 2% of that of the undisturbed run with the same seed of the model
and the data. Undisturbed runs of other seeds show what that is worth.

`late` counts pushes that came after the others had gone on, `dropped` those of them that were left out; `work` is the
share of the pushes of an undisturbed run that became part of updates. `--out` keeps every run and is read again, so
that a call goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import common

ISLANDS, EVERY, HEARTBEAT = 4, 16, 2.0
KINDS = ("worker", "server", "stop", "late")
PACE = 0.04  # seconds of a step besides its computation, so that other programs matter less
STOPPED = 30.0  # seconds
BAR = 0.02
LIMIT = 420.0  # seconds of a run
RAY_GONE = 100.0  # seconds in which Ray's own processes end
MARK = "ISLANDS_FAULTS"  # in the environment of all that a run starts
PATHS = f"{Path(__file__).resolve().parents[1]}:{Path(__file__).resolve().parent}"
MODEL = {"embed": 64, "layers": 2, "mlp": 256, "heads": 2}


@dataclass(frozen=True)
class IslandFault:
    """Something that happens to a run.

    Attributes:
        kind: see above.
        step: that the islands have agreed on before.
        moment: part of a round that passes since.
        island: its victim; None: the server.
    """

    kind: str
    step: int
    moment: float
    island: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.island is None else f' {self.island}'}@{self.step}"


@dataclass(frozen=True)
class FaultyCase:
    """What a run is to be.

    Attributes:
        name: of the case.
        steps: of each island.
        seed: of the model and the data.
        faults: that happen to it, in their order.
    """

    name: str
    steps: int
    seed: int = 0
    faults: tuple[IslandFault, ...] = ()

    @property
    def is_late(self) -> bool:
        """True if an island comes late."""
        return any(fault.kind == "late" for fault in self.faults)

    @property
    def key(self) -> dict[str, Any]:
        """The case as JSON has it."""
        return {"name": self.name, "steps": self.steps, "seed": self.seed, "faults": [asdict(x) for x in self.faults]}


def drawn(kinds: Sequence[str], steps: int, rng: random.Random, latest: float = 0.8) -> tuple[IslandFault, ...]:
    """Draws when things happen, and to whom: an island that comes late is spared."""
    victims = range(ISLANDS - 1 if "late" in kinds else ISLANDS)
    rounds = steps // EVERY
    faults = []
    for kind in kinds:
        last = 0.5 if kind == "late" else latest
        step = EVERY * rng.randint(max(1, round(0.1 * rounds)), max(1, round(last * rounds)))
        island = {"server": None, "late": ISLANDS - 1}.get(kind, rng.choice(victims))
        faults.append(IslandFault(kind, step, round(rng.uniform(0.2, 0.8), 2), island))
    return tuple(sorted(faults, key=lambda fault: fault.step))


def schedule(rng: random.Random) -> list[str]:
    """Draws what happens in a schedule; only one island may be late."""
    kinds = [rng.choice(KINDS) for _ in range(rng.randint(2, 4))]
    first = kinds.index("late") if "late" in kinds else None
    return [kind if kind != "late" or i == first else rng.choice(KINDS[:3]) for i, kind in enumerate(kinds)]


def cases(seed: int, schedules: int, steps: int) -> list[FaultyCase]:
    """Returns all runs, in their order."""
    found = [FaultyCase("undisturbed", steps)]
    for kind in KINDS:
        found.append(FaultyCase(kind, steps, 0, drawn([kind], steps, random.Random(f"{seed} {kind}"), 0.4)))
    found += [FaultyCase("again", steps), *(FaultyCase("undisturbed", steps, other) for other in (1,))]
    for index in range(schedules):
        rng = random.Random(f"{seed} {index}")
        found.append(FaultyCase(f"schedule-{index}", steps, 0, drawn(schedule(rng), steps, rng)))
    return found


def config_of(case: FaultyCase, folder: Path) -> Path:
    """Writes the config of a run."""
    waiting = {"quorum": ISLANDS - 1, "grace": 60.0} if case.is_late else {}
    config = {
        "name": "run", "dir": str(folder), "steps": case.steps, "seed": case.seed, "precision": "fp32",
        "layout": "ddp", "mesh": {"data": 1}, "model": MODEL,
        "sync": {"strategy": "diloco", "every": EVERY, "outer": {"lr": 0.8, "momentum": 0.5}},
        "islands": {"count": ISLANDS, "heartbeat": HEARTBEAT, **waiting},
        "data": {
            "sources": [{"path": "stdlib"}], "sequence": 64, "global_batch": 2 * ISLANDS, "validation_fraction": 0.05,
        },
        "optimizer": {"lr": 2e-3}, "schedule": {"name": "cosine", "warmup_steps": 20},
        "eval": {"every": case.steps, "batches": 16}, "checkpoint": {"every": case.steps // 4},
        "log": {"sample_tokens": 0, "tensorboard": False, "every": EVERY},
        "callbacks": [{"type": "islands_recorder:Recorder", "options": {"pace": [PACE] * ISLANDS}}],
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))
    return file


def process_facts() -> dict[int, tuple[int, int]]:
    """Returns parent and start of all processes that have not ended."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(file.parent.name)] = int(fields[1]), int(fields[19])
    return found


def text_of(pid: int, file: str) -> str:
    """Returns a file of a process in /proc; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


@dataclass
class FaultyRun:
    """A run and what happens to it.

    Attributes:
        case: what it is to be.
        folder: for its files.
        happened: faults that have come: step of the newest update, seconds since it, step of the victim.
    """

    case: FaultyCase
    folder: Path
    happened: list[dict[str, Any]] = field(default_factory=list)
    _launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _holder: subprocess.Popen[str] | None = None
    _address: str | None = None
    _known: dict[int, int] = field(default_factory=dict)  # pid and start of all that it has started
    _stopped: dict[int, float] = field(default_factory=dict)  # pid, and when it goes on
    _log_at: int = 0
    _clock: int = 0  # of the newest push
    _updates: list[tuple[float, int]] = field(default_factory=list)  # time, and clock of the newest push

    def __post_init__(self) -> None:
        self.directory = self.folder / "run"
        secret = {"RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_AUTH_MODE": "token"}
        self._environment = {
            **os.environ, **secret, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "", "PYTHONPATH": PATHS, MARK: str(self.folder),
        }  # fmt: skip
        self._file = config_of(self.case, self.folder)

    def launch(self, here: str | None) -> None:
        """Starts a launcher of some islands; None: of all."""
        command = [sys.executable, "-m", "jaxtrain.cli.main", "launch", "islands", str(self._file)]
        command += [] if here is None else ["--here", here, "--address", str(self._address)]
        with (self.folder / f"launcher-{len(self._launchers)}.log").open("wb") as log:
            self._launchers.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, start_new_session=True)
            )

    def train(self) -> dict[str, Any]:
        """Runs it. Returns its record."""
        begin = time.monotonic()
        if self.case.is_late:
            command = [sys.executable, __file__, "--cluster"]
            self._holder = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
            assert self._holder.stdout is not None
            self._address = self._holder.stdout.readline().strip()
        self.launch("0,1,2" if self.case.is_late else None)
        try:
            has_hung = not self._watch(begin + LIMIT)
            seconds = time.monotonic() - begin
            islands = [pid for pid in self._left() if "jaxtrain.cli" in text_of(pid, "cmdline")]
            if self._holder is not None:
                self._holder.communicate()
            ray_seconds = self._wait_for_ray()
            left = [text_of(pid, "cmdline") for pid in self._left()]
        finally:
            self._kill()
        codes = [launcher.returncode for launcher in self._launchers]
        return self.case.key | {
            "happened": self.happened, "code": next((code for code in codes if code), 0), "has_hung": has_hung,
            "islands_left": len(islands), "left": left, "ray_seconds": ray_seconds, "seconds": seconds,
        } | outcome(self.directory, self.case.steps)  # fmt: skip

    def _watch(self, until: float) -> bool:
        """Lets things happen until all launchers have ended. Returns whether they have in time."""
        faults, looked = list(self.case.faults), 0.0
        while any(launcher.poll() is None for launcher in self._launchers):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
            self._read_log()
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                self._left()
            for pid in [pid for pid, end in self._stopped.items() if time.monotonic() > end]:
                del self._stopped[pid]
                if process_facts().get(pid, (0, 0))[1] == self._known[pid]:
                    os.kill(pid, signal.SIGCONT)
            if faults and self._is_due(faults[0]) and self._strike(faults[0]):
                faults.pop(0)
        return True

    def _read_log(self) -> None:
        with contextlib.suppress(FileNotFoundError), (self.directory / "server/pushes.jsonl").open("rb") as file:
            file.seek(self._log_at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._log_at += len(line)
                record = json.loads(line)
                if record["event"] == "push":
                    self._clock = record["clock"]
                if record["event"] == "update":
                    self._updates.append((record["time"], self._clock))

    def _is_due(self, fault: IslandFault) -> bool:
        if len(self._updates) < 2 or self._updates[-1][1] < fault.step:
            return False
        (before, _), (last, _) = self._updates[-2:]
        part = fault.moment * min(last - before, 2 * HEARTBEAT)
        return time.time() - last >= part

    def _strike(self, fault: IslandFault) -> bool:
        """Does it. Returns False if the victim is not there now."""
        last, clock = self._updates[-1]
        if fault.kind == "late":
            self.launch(str(fault.island))
        else:
            wanted = ("ServerProcess",) if fault.island is None else ("jaxtrain.cli.worker", f"/island-{fault.island}")
            found = [pid for pid in self._left() if all(each in text_of(pid, "cmdline") for each in wanted)]
            if not found:
                return False
            os.kill(found[-1], signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
            if fault.kind == "stop":
                self._stopped[found[-1]] = time.monotonic() + STOPPED
        steps = [] if fault.island is None else lines(self.directory / f"island-{fault.island}/times.jsonl")
        own = max((record["step"] for record in steps), default=None)
        after = round(time.time() - last, 3)
        self.happened.append({"what": str(fault), "clock": clock, "seconds_after_update": after, "own_step": own})
        return True

    def _left(self) -> list[int]:
        """Returns all processes that the run has started and that are there."""
        facts = process_facts()
        roots = [process.pid for process in (*self._launchers, self._holder) if process is not None]
        below = {pid for pid in roots if pid in facts}
        below |= {pid for pid, start in self._known.items() if pid in facts and facts[pid][1] == start}
        below |= {pid for pid in facts if f"{MARK}={self.folder}" in text_of(pid, "environ")}
        while more := {pid for pid, (parent, _) in facts.items() if parent in below} - below:
            below |= more
        self._known |= {pid: facts[pid][1] for pid in below}
        return sorted(below)

    def _wait_for_ray(self) -> float:
        """Waits until Ray's own processes have ended. Returns the seconds."""
        begin = time.monotonic()
        while self._left() and time.monotonic() - begin < RAY_GONE:
            time.sleep(0.5)
        return time.monotonic() - begin

    def _kill(self) -> None:
        """Ends what is left, where something is wrong."""
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (*self._launchers, self._holder):
            if process is not None:
                process.wait()


def lines(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a file."""
    try:
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    except FileNotFoundError:
        return []


def outcome(directory: Path, steps: int) -> dict[str, Any]:
    """Returns what the folder of a run says: losses, pushes and updates."""
    log = lines(directory / "server/pushes.jsonl")
    losses: list[float | None] = []
    for island in range(ISLANDS):
        found = [
            line["eval/loss"] for line in lines(directory / f"island-{island}/metrics.jsonl") if "eval/loss" in line
        ]
        losses.append(found[-1] if found else None)
    events = [line for line in lines(directory / "island-0/events.jsonl") if "unigram_entropy" in line]
    late = [record for record in log if record["event"] == "late"]
    updates = [record["islands"] for record in log if record["event"] == "update"]
    return {
        "losses": losses, "unigram_entropy": events[0]["unigram_entropy"] if events else None,
        "lost": lost(log), "late": len(late), "dropped": sum(not record["counts"] for record in late),
        "work": sum(map(len, updates)) / (ISLANDS * steps / EVERY),
        "updates_by_islands": dict(sorted(Counter(str(len(each)) for each in updates).items())),
        "leaves": dict(Counter(record["reason"] for record in log if record["event"] == "leave")),
    }  # fmt: skip


def lost(log: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many pushes that were acknowledged are in no update."""
    pushed = Counter(record["island"] for record in log if record["event"] == "push")
    merged = Counter(island for record in log if record["event"] == "update" for island in record["islands"])
    return sum((pushed - merged).values()) + sum((merged - pushed).values())


def base_of(runs: Sequence[Mapping[str, Any]], seed: int, steps: int) -> float:
    """Returns the loss of the undisturbed run of a seed."""
    known = [run for run in runs if run["name"] == "undisturbed" and (run["seed"], run["steps"]) == (seed, steps)]
    return known[0]["losses"][0] if known else math.nan


def against(run: Mapping[str, Any], base: float) -> float:
    """Returns how far the island is from a loss that is furthest from it, relative to it; infinite without a loss."""
    return max((math.inf if loss is None else loss / base - 1 for loss in run["losses"]), key=abs)


def rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the table."""
    out = []
    for run in runs:
        far = against(run, base_of(runs, run["seed"], run["steps"]))
        is_whole = not (run["code"] or run["has_hung"] or run["lost"] or run["islands_left"] or run["left"])
        out.append({
            "case": run["name"], "seed": run["seed"],
            "faults": " ".join(each["what"].replace(" ", "-") for each in run["happened"]) or "-",
            "loss": f"{max(loss or math.nan for loss in run['losses']):.4f}", "against": f"{100 * far:+.2f}%",
            "work": f"{run['work']:.2f}", "late": run["late"], "dropped": run["dropped"], "lost": run["lost"],
            "left": run["islands_left"] + len(run["left"]), "code": run["code"], "seconds": round(run["seconds"]),
            "bar": "met" if is_whole and abs(far) <= BAR else "NOT met",
        })  # fmt: skip
    return out


@contextlib.contextmanager
def folder_of(keep: Path | None, name: str) -> Iterator[Path]:
    """Yields a folder for the files of a run, which stays if it is to be kept."""
    if keep is not None:
        (keep / name).mkdir(parents=True)
        yield keep / name
        return
    with tempfile.TemporaryDirectory(prefix="faults", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def hold_cluster() -> None:
    """Holds a Ray cluster, whose address it prints, until its input is closed."""
    from jaxtrain.islands.ray_engine import cluster

    with cluster("holder", None, 2 << 30) as address:
        print(address, flush=True)
        sys.stdin.read()


def main() -> None:
    """Runs what is missing, compares, prints."""
    parser = common.parser(__doc__)
    parser.add_argument("--cluster", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help="of what happens, when and to whom")
    parser.add_argument("--schedules", type=int, default=10)
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--only", nargs="+", help="cases of these names alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--keep", type=Path, help="folder in which the files of the runs stay")
    args = parser.parse_args()
    if args.cluster:
        return hold_cluster()
    if args.quick:
        args.steps, args.schedules, args.only = 160, 0, ["undisturbed", "server"]
    runs = json.loads(args.out.read_text())["results"]["runs"] if args.out and args.out.exists() else []
    end, about = time.monotonic() + 60 * args.minutes, common.machine("ray")
    for case in cases(args.seed, args.schedules, args.steps):
        is_known = any(case.key.items() <= run.items() for run in runs)
        if is_known or (args.only and case.name not in args.only) or time.monotonic() > end:
            continue
        with folder_of(args.keep, f"{case.name}-{case.seed}") as folder:
            runs.append(FaultyRun(case, folder).train())
        print(" ".join(f"{key} {value}" for key, value in rows(runs)[-1].items()), flush=True)
        common.report("islands_faults", args, {"table": rows(runs), "runs": runs}, about)
    order = [(case.name, case.seed) for case in cases(args.seed, args.schedules, args.steps)]
    runs.sort(key=lambda run: order.index((run["name"], run["seed"])) if (run["name"], run["seed"]) in order else -1)
    print(common.table(rows(runs)))
    common.report("islands_faults", args, {"table": rows(runs), "runs": runs}, about)


if __name__ == "__main__":
    main()
