"""Kills workers and supervisors of launched runs at seeded points, and compares them with an undisturbed run.

    python benchmarks/chaos_processes.py [--kills 80] [--seed 0] [--processes 2] [--out chaos-processes.json]

Every run is a real `jaxtrain launch local --processes 2 --devices-per-process 2` of the small decoder of `chaos.py`,
fsdp over four devices: checkpoints every 4 steps, validation every 6. Each meets up to four misfortunes that the seed
draws. Deaths come by a fault of the config (`kill@PLACE:STEP/PROCESS`), or by SIGKILL from outside at a drawn moment of
a generation: to a worker (`any@SECONDS/PROCESS`), to the supervisor (`supervisor@SECONDS`), whose workers must die with
it before the run is launched again, or to the leader (`leader@SECONDS`), which must be started again while the workers
train on. The others are no deaths: a leader that is stopped for good (`stopped`), a closed terminal (`hangup`: the run
saves, ends with 75 and is launched again), a closed pipe of its output (`pipe`), strangers on the leader's port
(`stranger`), a disk that is full for one process (`full_disk@STEP/PROCESS`). Every other run keeps in-memory
checkpoints (`--memory 1`); such a run does not return to a checkpoint on disk, so a fault may be skipped with the save
that it was in. New runs are drawn until the requested number of deaths is reached.

Every run must end with exit code 0, the losses of the undisturbed run bit by bit and the same token ids in every row of
every step; no process, lock, temporary file or folder may be left.

`noticed` is from a death to the end of the generation: all its workers are gone. `recovery` is from a death to the end
of the first step of the next generation, including the start of Python, imports, rendezvous and compilation: simulated
devices have no compilation cache.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import chaos
import common

from jaxtrain.core import xla_options
from jaxtrain.exit_codes import SAVED

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "launch"  # has the data class that writes down which rows it gave
DEVICES, ROWS, SEQUENCE = 2, 4, 64  # of each process; rows and tokens of a batch
PLACES = (*chaos.PLACES, "supervisor", "leader", "stopped", "hangup", "pipe", "stranger", "full_disk")
OUTSIDE = ("any", "supervisor", "leader", "stopped", "hangup", "pipe", "stranger")
ENDING = ("any", "supervisor", "hangup")  # a generation
FIRST_ONLY = ("commit", "committed")  # process 0 alone writes the marker
LIMIT = 300.0  # seconds of a run
SOON = 0.7  # of a generation
GONE = 20.0  # seconds in which workers follow their supervisor
MARK = "CHAOS_RUN"  # in the environment of all that a run starts
# As tests/conftest.py: compiling is most of a generation's time.
CHEAP = xla_options.as_flags(xla_options.fast_compile() | {"xla_cpu_parallel_codegen_split_count": 1})


@dataclass
class Launched(chaos.Outcome):
    """Outcome of one launched run; `processes` counts generations.

    `plan` has the faults that happened, `passed_over` the others; `noticed` is in seconds, `restored` names the source.
    """

    memory: int = 0
    noticed: list[float] = field(default_factory=list)
    restored: dict[str, int] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)


def config(folder: Path, name: str, steps: int, faults: list[str]) -> Path:
    """Writes the config of the run of this name as a file (JSON is YAML)."""
    tokens = folder / "tokens" / name
    tokens.mkdir(parents=True)
    options = {"corpus": str(folder / "text"), "cache": str(folder / "cache"), "folder": str(tokens)}
    text = {
        "name": name, "dir": str(folder / "runs"), "simulate": DEVICES, "steps": steps, "precision": "fp32",
        "layout": "fsdp", "model": {"embed": 32, "layers": 2, "heads": 2, "mlp": 64},
        "data": {"type": "recorded_data:Recorded", "options": options | {"sequence": SEQUENCE},
                 "sequence": SEQUENCE, "global_batch": ROWS},
        "optimizer": {"lr": 1e-3}, "schedule": {"name": "constant"}, "loss": {"vocab_chunks": 1},
        "checkpoint": {"every": chaos.SAVES}, "eval": {"every": chaos.EVALS, "batches": 1},
        "log": {"tensorboard": False, "peak_tflops": 1}, "debug": {"faults": [chaos.fault(text) for text in faults]},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(text))
    return file


class Launch:
    """One run under `jaxtrain launch local`, and the killer of its processes."""

    def __init__(self, folder: Path, outcome: Launched, processes: int) -> None:
        self.outcome, self.folder, self.run_dir = outcome, folder, folder / "runs" / outcome.name
        self.temporary = folder / "tmp" / outcome.name
        self.temporary.mkdir(parents=True)
        self.killed: list[float] = []  # when, from outside
        self.leaders_killed = 0
        self._has_hung_up = False
        self._output = -1  # of a supervisor whose output is a pipe
        self.outside = [text for text in outcome.plan if text.partition("@")[0] in OUTSIDE]
        self._arguments = [
            "local", f"--processes={processes}", f"--devices-per-process={DEVICES}", f"--memory={outcome.memory}",
            "--backoff=0.1", "--max-restarts=50", "--max-failures=50", "--heartbeat=10",
        ]  # fmt: skip
        self._seen, self._since = 0, time.monotonic()

    def start(self, source: Path) -> subprocess.Popen:
        """Starts a supervisor of a config, or of the run's folder."""
        base = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
        paths = [str(ROOT), str(RECORDED), os.environ.get("PYTHONPATH", "")]
        env = base | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "XLA_FLAGS": CHEAP, "JAX_PLATFORMS": "cpu",
            "TMPDIR": str(self.temporary), MARK: str(self.run_dir),
        }  # fmt: skip
        command = [sys.executable, "-m", "jaxtrain.cli.main", "launch", *self._arguments, str(source)]
        with open(self.folder / f"{self.outcome.name}.log", "ab") as log:
            if not any(text.startswith("pipe") for text in self.outside):
                return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            self._output, writer = os.pipe()
            os.set_blocking(self._output, False)
            process = subprocess.Popen(command, env=env, stdout=writer, stderr=log, start_new_session=True)
            os.close(writer)
            return process

    def finish(self, source: Path) -> int:
        """Launches it, again after each death of its supervisor, and returns the last exit code."""
        supervisor, until = self.start(source), time.monotonic() + LIMIT
        while supervisor.poll() is None:
            self._watch(supervisor)
            if time.monotonic() > until:
                self.outcome.wrong.append(f"not done after {LIMIT:.0f} s")
                break
            time.sleep(0.01)
        else:
            if supervisor.returncode == -signal.SIGKILL or (supervisor.returncode == SAVED and self._has_hung_up):
                self._has_hung_up = False
                self._await_workers()
                return self.finish(self.run_dir)
        for pid in running(self.run_dir):  # only where something is wrong
            os.kill(pid, signal.SIGKILL)
        return supervisor.wait()

    def _watch(self, supervisor: subprocess.Popen) -> None:
        """Kills a process when it is due, at most once in a generation."""
        if self._output >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._output, 1 << 16)
        if not self.outside:
            return
        generations = len(records(self.run_dir, "start"))
        if generations > self._seen:
            self._seen, self._since = generations, time.monotonic()
        what, _, rest = self.outside[0].partition("@")
        moment, _, process = rest.partition("/")
        if not generations or time.monotonic() - self._since < float(moment):
            return
        if not self._strike(what, supervisor, process):
            return
        del self.outside[0]
        self._since = float("inf") if what in ENDING else time.monotonic()  # until the next generation

    def _strike(self, what: str, supervisor: subprocess.Popen, process: str) -> bool:
        """Does one thing from outside. Returns whether it could be done."""
        if what == "pipe":
            os.close(self._output)
            self._output = -1
            return True
        leaders = [pid for pid in running(self.run_dir) if "jaxtrain.cli.leader" in command_line(pid)]
        if what in ("leader", "stopped", "stranger"):
            if not leaders:
                return False
            if what == "stranger":
                return disturb(leaders[0])
            os.kill(leaders[0], signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
            self.leaders_killed += what == "leader"
            return True
        victim = supervisor.pid if what in ("supervisor", "hangup") else self._worker(process)
        if victim is None:
            return False
        os.kill(victim, signal.SIGHUP if what == "hangup" else signal.SIGKILL)
        self._has_hung_up |= what == "hangup"
        if what != "hangup":
            self.killed.append(time.time())
        return True

    def _worker(self, process: str) -> int | None:
        """Pid of a process of the generation; None if it is gone."""
        for pid in running(self.run_dir):
            if f"JAX_PROCESS_ID={process}" in environment(pid):
                return pid
        return None

    def _await_workers(self) -> None:
        until = time.monotonic() + GONE
        while running(self.run_dir):
            if time.monotonic() > until:
                self.outcome.wrong.append("workers outlived their supervisor")
                return
            time.sleep(0.01)


def environment(pid: int | str) -> list[str]:
    """Environment of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def command_line(pid: int) -> str:
    """Command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def disturb(leader: int) -> bool:
    """Connects strangers to a leader's port. Returns False if it does not listen yet."""
    inodes = {os.readlink(file) for file in Path(f"/proc/{leader}/fd").iterdir() if os.path.lexists(file)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 16), b""):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports[0] if ports else 1), 1) as one:
            one.sendall(data)
    return bool(ports)


def running(run_dir: Path) -> list[int]:
    """Live processes that a run has started, directly or not."""
    mark = f"{MARK}={run_dir}"
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and mark in environment(name)]


def records(run_dir: Path, kind: str, file: str = "launch.jsonl") -> list[dict[str, Any]]:
    """Records of one kind."""
    return [record for record in chaos.read(run_dir / file) if record["kind"] == kind]


def moment(record: dict[str, Any]) -> float:
    """Time at which a record was written, as `time.time()`."""
    return datetime.fromisoformat(record["time"]).timestamp()


def disturbed(folder: Path, name: str, steps: int, plan: list[str], memory: int, processes: int) -> Launched:
    """Launches a run and carries out its plan."""
    outcome = Launched(name, plan, memory=memory)
    launch = Launch(folder, outcome, processes)
    faults = [text for text in plan if text.partition("@")[0] not in OUTSIDE]
    begun = time.monotonic()
    code = launch.finish(config(folder, name, steps, faults))
    outcome.seconds = time.monotonic() - begun
    if code:
        outcome.wrong.append(f"exit code {code}: {chaos.last_line(folder / f'{name}.log')}")
    came = chaos.read(launch.run_dir / "faults.jsonl")
    deaths = sorted([moment(record) for record in came if record["fault"].startswith("kill")] + launch.killed)
    ends = [moment(record) for record in records(launch.run_dir, "end")]
    firsts = [moment(event) for event in records(launch.run_dir, "compiled", "events.jsonl")]
    outcome.deaths = len(deaths) + launch.leaders_killed
    outcome.processes = len(records(launch.run_dir, "start"))
    outcome.noticed, outcome.recoveries = after(deaths, ends), after(deaths, firsts)
    resumes = records(launch.run_dir, "resume", "events.jsonl")
    sources = (str(event.get("restored", "nothing")).removeprefix(f"{folder}/") for event in resumes)
    outcome.restored = dict(Counter(sources))
    happened = Counter(record["fault"] for record in came)
    passed = Counter[str]()
    for text in faults:
        name = chaos.recorded(text)
        passed[text] += not happened[name]
        happened[name] -= happened[name] > 0
    outcome.passed_over = [*passed.elements(), *launch.outside]
    outcome.plan = list((Counter(plan) - Counter(outcome.passed_over)).elements())
    if passed.total() and not memory and not any(text.startswith("full_disk") for text in plan):
        outcome.wrong.append(f"did not come: {', '.join(passed.elements())}")
    return outcome


def after(deaths: list[float], events: list[float]) -> list[float]:
    """Seconds from each death to the next event; of consecutive deaths the first counts."""
    found, last = [], 0.0
    for event in sorted(events):
        since = [death for death in deaths if last < death < event]
        found += [event - since[0]] if since else []
        last = event
    return found


def tokens(folder: Path, name: str, steps: int) -> str:
    """Hash of the token ids of every row of every step. Raises AssertionError if generations differ."""
    from recorded_data import recorded

    rows = recorded(folder / "tokens" / name)
    expected = [(step, row) for step in range(steps) for row in range(ROWS)]
    return hashlib.sha256(json.dumps([rows.get(key) for key in expected]).encode()).hexdigest()


def compare(folder: Path, outcome: Launched, steps: int) -> None:
    """Records the differences of a run from the undisturbed one, `whole`."""
    run_dir = folder / "runs" / outcome.name
    if chaos.losses(run_dir) != chaos.losses(folder / "runs" / "whole"):
        outcome.wrong.append("other losses")
    try:
        if tokens(folder, outcome.name, steps) != tokens(folder, "whole", steps):
            outcome.wrong.append("another stream of tokens")
    except AssertionError as error:
        outcome.wrong.append(str(error))
    if left := running(run_dir):
        outcome.wrong.append(f"processes left: {left}")
    if left := sorted(path.name for path in (folder / "tmp" / outcome.name).iterdir()):
        outcome.wrong.append(f"left in the temporary folder: {', '.join(left[:3])}")
    outcome.wrong += chaos.litter(run_dir)


def drawn(index: int, many: int, steps: int, processes: int, typical: float, rng: random.Random) -> list[str]:
    """Draws the plan of a run with this number of deaths, at all points in turn."""
    return [death(PLACES[(index + i) % len(PLACES)], steps, processes, typical, rng) for i in range(many)]


def death(place: str, steps: int, processes: int, typical: float, rng: random.Random) -> str:
    """Draws one death. `typical`: seconds of an undisturbed generation; moments are in its first part, because resumed
    generations are shorter."""
    latest = SOON * typical
    if place in OUTSIDE and place != "any":
        return f"{place}@{rng.uniform(0, latest):.2f}"
    process = 0 if place in FIRST_ONLY else rng.randrange(processes)
    if place == "any":
        return f"any@{rng.uniform(0, latest):.2f}/{process}"
    if place == "full_disk":
        return f"full_disk@{chaos.SAVES * rng.randint(1, (steps - 1) // chaos.SAVES)}/{process}"
    return f"{chaos.kill_at(place, steps + 1, rng)}/{process}"  # the last step, and what comes after it, too


def campaign(folder: Path, args: argparse.Namespace) -> tuple[list[Launched], float]:
    """All runs: (outcomes, seconds of the undisturbed one's only generation)."""
    chaos.corpus(folder)
    rng, drew, deaths, outcomes = random.Random(args.seed), 0, 0, []
    whole = disturbed(folder, "whole", args.steps, [], 0, args.processes)
    if whole.wrong:
        raise SystemExit(f"the undisturbed run fails: {whole.wrong[0]}")
    typical = records(folder / "runs" / "whole", "end")[0]["seconds"]
    while deaths < args.kills and len(outcomes) < args.kills:
        many = min(args.kills - deaths, rng.randint(2, 4))
        plan = drawn(drew, many, args.steps, args.processes, typical, rng)
        drew += many
        outcome = disturbed(folder, f"run-{len(outcomes)}", args.steps, plan, len(outcomes) % 2, args.processes)
        compare(folder, outcome, args.steps)
        outcomes.append(outcome)
        deaths += outcome.deaths
        said = "; ".join(outcome.wrong) or "equal"
        kept = " (in memory)" if outcome.memory else ""
        missed = f" ({' '.join(outcome.passed_over)} passed over)" if outcome.passed_over else ""
        happened = f"{' '.join(outcome.plan)}{missed}: {outcome.deaths} deaths, {outcome.seconds:.1f} s"
        print(f"{outcome.name}{kept}: {happened}, {said}", flush=True)
    return outcomes, typical


def by_memory(outcomes: list[Launched]) -> list[dict[str, Any]]:
    """Times with and without in-memory checkpoints."""
    rows = []
    for memory in (0, 1):
        had = [outcome for outcome in outcomes if outcome.memory == memory]
        noticed = [second for outcome in had for second in outcome.noticed]
        recoveries = [second for outcome in had for second in outcome.recoveries]
        if not recoveries or not noticed:
            continue
        restored = sum((Counter(outcome.restored) for outcome in had), Counter())
        rows.append({
            "states": "and in memory" if memory else "on disk", "runs": len(had),
            "deaths": sum(outcome.deaths for outcome in had), "generations": sum(outcome.processes for outcome in had),
            "from memory": restored["the memory of the nodes"],
            "noticed s": common.spread(noticed)["median"], "recovery s": common.spread(recoveries)["median"],
            "most s": max(recoveries), "equal": sum(not outcome.wrong for outcome in had),
        })  # fmt: skip
    return rows


def main() -> None:
    """Draws, kills, compares, prints."""
    parser = common.parser(__doc__)
    parser.add_argument("--kills", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.quick:
        args.kills, args.steps = 2, 8
    sys.path.append(str(RECORDED))
    with tempfile.TemporaryDirectory() as name:
        outcomes, typical = campaign(Path(name), args)
    chaos.conclude("chaos_processes", args, outcomes, PLACES, typical, {"memory": by_memory(outcomes)})


if __name__ == "__main__":
    main()
