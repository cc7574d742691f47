"""Kills runs at seeded points, restarts them until they finish, and compares them with an undisturbed run.

    python benchmarks/chaos.py [--kills 230] [--seed 0] [--steps 24] [--every 4 8 16] [--out chaos.json]

A small decoder on packed text, checkpoints every 4 steps, validation every 6. Each run meets up to three faults:
SIGKILL after a step, in the loader, in validation, between the metrics and the save, during a save, before or after the
rename of a marker, or at a random moment; some runs also get a full disk or a damaged checkpoint. After each death a
new process resumes the run, as `jaxtrain resume` does.

Every run must end with the losses of the undisturbed one, bit by bit, and the same hash of its training tokens; no
process, lock or temporary file may be left. `recovery` is from the death of a process to the end of the first step of
the next; `--every N` kills one run after every N steps and prints its goodput: the wall time of the undisturbed steps
over that of the disturbed run. A small model's steps take milliseconds, so this measures restarts, not training; `at an
hour` is the goodput of one failure an hour with the recovery measured here.

Workers are forked from this process, which has imported all modules but has one thread and no JAX backend.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import common

# Before JAX and NumPy are loaded: one device, and no threads that a fork would lose.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "OPENBLAS_NUM_THREADS": "1"}

IN_SAVE = ("save", "commit", "committed")
PLACES = ("step", "data", "eval", "logged", *IN_SAVE, "any")
SAVES, EVALS = 4, 6  # steps between them
LIMIT = 120.0  # seconds of one process
MOST = 12  # processes of one run


@dataclass
class Outcome:
    """Outcome of one run: its plan, its deaths, and its differences from the undisturbed run."""

    name: str
    plan: list[str]
    deaths: int = 0
    processes: int = 0
    recoveries: list[float] = field(default_factory=list)
    replayed: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def corpus(folder: Path) -> Path:
    """A few text files of random words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(300)]
    (folder / "text").mkdir()
    for index in range(60):
        (folder / "text" / f"{index}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(20, 400))))
    return folder / "text"


def config(folder: Path, name: str, steps: int, faults: list[str]) -> Any:
    """Config of the run of this name."""
    import jaxtrain

    base = {
        "name": name, "dir": str(folder / "runs"), "steps": steps, "precision": "fp32", "simulate": 1,
        "model": {"embed": 32, "layers": 2, "heads": 2, "mlp": 64},
        "data": {"sources": [{"path": str(folder / "text")}], "sequence": 64, "global_batch": 4,
        "validation_fraction": 0.1,
                 "cache_dir": str(folder / "cache"), "workers": 1},
        "optimizer": {"lr": 1e-3}, "schedule": {"name": "constant"}, "loss": {"vocab_chunks": 1},
        "checkpoint": {"every": SAVES}, "eval": {"every": EVALS, "batches": 1}, "log": {"tensorboard": False},
        "debug": {"faults": [fault(text) for text in faults]},
    }  # fmt: skip
    return jaxtrain.load(None, base=base)


def fault(text: str) -> dict[str, Any]:
    """One of `debug.faults`, from a text such as `kill@save:8/1`."""
    kind, _, rest = text.partition("@")
    rest, _, process = rest.partition("/")
    at, _, step = rest.rpartition(":")
    return {"kind": kind, "at": at or None, "step": int(step), "process": int(process or 0)}


def recorded(text: str) -> str:
    """Name of a fault in faults.jsonl."""
    from jaxtrain.callbacks.fault_injection import describe
    from jaxtrain.config.schema import FaultConfig

    return describe(FaultConfig(**fault(text)))


def work(config: Any, run_dir: Path) -> int:
    """Worker: trains or resumes. Every step first records the tokens that it trains on."""
    import jax
    import numpy as np

    import jaxtrain
    from jaxtrain.api import trainer as trainer_api

    real = trainer_api.open_trainer

    def noting(*args: Any, **options: Any) -> Any:
        run, state, done = real(*args, **options)
        step, out = run.program.step, os.open(run_dir / "stream.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        index = done

        def noted(state: Any, batch: Any) -> Any:
            nonlocal index
            index += 1
            parts = [np.asarray(jax.device_get(batch[name])).tobytes() for name in sorted(batch)]
            line = {"step": index, "hash": hashlib.sha256(b"".join(parts)).hexdigest()}
            os.write(out, (json.dumps(line) + "\n").encode())
            return step(state, batch)

        run.program = replace(run.program, step=noted)
        return run, state, done

    trainer_api.open_trainer = noting
    jaxtrain.train(config, run_dir=run_dir, resume=(run_dir / "config.yaml").exists())
    return 0


def start(config: Any, run_dir: Path) -> int:
    """Forks a worker in a new session and returns its process id; its output goes to RUN_DIR.log."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(run_dir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = work(config, run_dir)
    except BaseException as error:  # the child must never return into the supervisor
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def wait(pid: int, kill_after: float | None) -> int:
    """Waits for the exit status of a worker (minus the signal); kills it after the timeout."""
    begun = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        age = time.monotonic() - begun
        if age > LIMIT or (kill_after is not None and age > kill_after):
            os.kill(pid, signal.SIGKILL)
            kill_after = None
        time.sleep(0.002)


def disturbed(folder: Path, name: str, steps: int, plan: list[str], rng: random.Random, typical: float) -> Outcome:
    """Runs until it finishes, through all faults of its plan. `typical`: seconds of a run, for random moments."""
    outcome, run_dir, died = Outcome(name, plan), folder / "runs" / name, None
    faults = [text for text in plan if text != "any"]
    moments = [rng.uniform(0, typical) for text in plan if text == "any"]
    begun = time.monotonic()
    while True:
        outcome.processes += 1
        pid = start(config(folder, name, steps, faults), run_dir)
        status = wait(pid, moments.pop() if moments else None)
        ended = time.time()
        if died is not None and (recovered := first_step_after(run_dir, died)) is not None:
            outcome.recoveries.append(recovered - died)
            died = None
        if alive(pid):
            outcome.wrong.append(f"orphans of process {pid}")
        if status == 0 or outcome.processes >= MOST:
            break
        if status != -signal.SIGKILL:
            outcome.wrong.append(f"a process ended with {status}: {last_line(run_dir.with_suffix('.log'))}")
            break
        outcome.deaths += 1
        died = ended if died is None else died
    outcome.seconds = time.monotonic() - begun
    outcome.replayed = len(read(run_dir / "stream.jsonl")) - steps
    return outcome


def alive(session: int) -> bool:
    """Returns whether a process of the session is alive."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                after = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(after[3]) == session and after[0] != "Z":
                return True
    return False


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file, without broken lines."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def first_step_after(run_dir: Path, died: float) -> float | None:
    """Time at which the first step after a death finished."""
    times = [
        datetime.fromisoformat(e["time"]).timestamp() for e in read(run_dir / "events.jsonl") if e["kind"] == "compiled"
    ]
    return next((moment for moment in times if moment > died), None)


def last_line(path: Path) -> str:
    lines = [line for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
    return lines[-1][-200:] if lines else "nothing said"


def losses(run_dir: Path) -> dict[int, tuple]:
    """All logged numbers of a run except times, by step."""
    records = read(run_dir / "metrics.jsonl")
    names = ("loss", "grad_norm", "lr", "skipped", "eval/loss")
    return {record["step"]: tuple(record.get(name) for name in names) for record in records}


def stream(run_dir: Path) -> str:
    """Hash of a run's training tokens, in order; a replayed step must have the same."""
    seen: dict[int, set[str]] = {}
    for record in read(run_dir / "stream.jsonl"):
        seen.setdefault(record["step"], set()).add(record["hash"])
    text = json.dumps([sorted(seen[step]) for step in sorted(seen)])
    return hashlib.sha256(text.encode()).hexdigest()


def compare(whole: Path, run_dir: Path, outcome: Outcome) -> None:
    """Records the differences of a disturbed run."""
    if losses(run_dir) != losses(whole):
        outcome.wrong.append("other losses")
    if stream(run_dir) != stream(whole):
        outcome.wrong.append("another stream of tokens")
    if sorted(record["fault"] for record in read(run_dir / "faults.jsonl")) != sorted(
        recorded(text) for text in outcome.plan if text != "any"
    ):
        outcome.wrong.append("not all faults came")
    outcome.wrong += litter(run_dir)


def litter(run_dir: Path) -> list[str]:
    """Files that a run has left behind: temporary files, files about to be deleted, a lock."""
    signs = (".tmp", ".new", ".orbax-checkpoint-tmp")
    left = [path.name for path in run_dir.rglob("*") if any(sign in path.name for sign in signs)]
    left += [str(path) for path in (run_dir / "checkpoints" / ".trash").glob("*")]
    found = [f"left behind: {', '.join(left[:3])}"] if left else []
    with open(run_dir / "checkpoints" / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found.append("a lock is held")
    return found


def drawn(kills: int, steps: int, rng: random.Random) -> list[list[str]]:
    """Draws plans of runs, up to three kills each, with this total number of kills; all points are used in turn."""
    plans: list[list[str]] = []
    while kills:
        plan: list[str] = []
        for _ in range(min(kills, rng.randint(1, 3))):
            plan.append(kill_at(PLACES[kills % len(PLACES)], steps, rng))
            kills -= 1
        saves = list(range(SAVES, steps, SAVES))
        extra = rng.random()
        if extra < 0.2:
            # Not of a save that a death is to come in: where the next save is due before its second try, there is none.
            free = [step for step in saves if not any(f"kill@{place}:{step}" in plan for place in IN_SAVE)]
            plan += [f"full_disk@{rng.choice(free)}"] if free else []
        elif extra < 0.4:
            at = rng.choice(saves)  # and a death before the next save, or nobody would look at it
            plan += [f"corrupt@{at}", f"kill@{at + 1 + rng.randrange(SAVES - 1)}"]
            kills = max(0, kills - 1)
        plans.append(plan)
    return plans


def kill_at(place: str, steps: int, rng: random.Random) -> str:
    if place == "any":
        return place
    every = {"eval": EVALS, "logged": SAVES, "save": SAVES, "commit": SAVES, "committed": SAVES}.get(place, 1)
    step = every * rng.randint(1, (steps - 1) // every)
    return f"kill@{step}" if place == "step" else f"kill@{place}:{step}"


def goodput(folder: Path, every: int, steps: int, whole: Path, typical: float) -> tuple[dict[str, Any], Outcome]:
    """Goodput of a run that is killed after every N steps."""
    plan = [f"kill@{step}" for step in range(every, steps, every)]
    outcome = disturbed(folder, f"every-{every}", steps, plan, random.Random(0), typical)
    compare(whole, folder / "runs" / outcome.name, outcome)
    times = [event["time"] for event in read(whole / "events.jsonl") if event["kind"] in ("compiled", "stop")]
    first, last = (datetime.fromisoformat(moment).timestamp() for moment in (times[0], times[-1]))
    recovery = common.spread(outcome.recoveries)["median"] if outcome.recoveries else 0.0
    row = {
        "a failure every": f"{every} steps", "failures": outcome.deaths, "replayed steps": outcome.replayed,
        "undisturbed s": last - first, "disturbed s": outcome.seconds,
        "goodput": (last - first) / outcome.seconds, "at an hour": 3600 / (3600 + recovery),
    }  # fmt: skip
    return row, outcome


def by_place(outcomes: Sequence[Outcome], places: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each point: number of kills, and their runs."""
    rows = []
    for place in places:

        def is_here(text: str, place: str = place) -> bool:
            kind, _, rest = text.partition("@")
            where = kind if kind != "kill" else rest.partition(":")[0] if ":" in rest else "step"
            return where == place

        had = [outcome for outcome in outcomes if any(is_here(text) for text in outcome.plan)]
        rows.append({
            "place": place, "faults": sum(is_here(text) for outcome in outcomes for text in outcome.plan),
            "runs": len(had), "equal": sum(not outcome.wrong for outcome in had),
        })  # fmt: skip
    return rows


def conclude(
    name: str, args: argparse.Namespace, outcomes: Sequence[Outcome], places: Sequence[str], typical: float,
    tables: dict[str, list[dict[str, Any]]],
) -> NoReturn:  # fmt: skip
    """Prints all outcomes and writes them to `--out`; returns 1 if one of them is wrong."""
    machine = common.machine("jaxlib", "orbax-checkpoint")
    rows = by_place(outcomes, places)
    print(common.title(machine), "", common.table(rows), "", sep="\n")
    recoveries = [second for outcome in outcomes for second in outcome.recoveries]
    found = common.spread(recoveries) | {"most": max(recoveries)} if recoveries else {}
    deaths, wrong = sum(outcome.deaths for outcome in outcomes), [o for o in outcomes if o.wrong]
    print(f"{deaths} deaths in {len(outcomes)} runs, {len(wrong)} of them wrong; undisturbed run {typical:.1f} s")
    print("recovery, s: " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()))
    for table in tables.values():
        print("", common.table(table), sep="\n") if table else None
    for outcome in wrong:
        print(f"WRONG {outcome.name} {' '.join(outcome.plan)}: {'; '.join(outcome.wrong)}")
    results = {"places": rows, "deaths": deaths, "wrong": len(wrong), "recovery": found, **tables}
    common.report(name, args, results | {"runs": [vars(outcome) for outcome in outcomes]}, machine)
    sys.exit(1 if wrong else 0)


def main() -> None:
    """Draws, kills, compares, prints."""
    parser = common.parser(__doc__)
    parser.add_argument("--kills", type=int, default=230)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, nargs="*", default=[4, 8, 16], help="steps between the kills of one run")
    args = parser.parse_args()
    if args.quick:
        args.kills, args.every = 3, []
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    import_all()
    with tempfile.TemporaryDirectory() as name:
        outcomes, rows, typical = campaign(Path(name), args)
    conclude("chaos", args, outcomes, (*PLACES, "full_disk", "corrupt"), typical, {"goodput": rows})


def campaign(folder: Path, args: argparse.Namespace) -> tuple[list[Outcome], list[dict[str, Any]], float]:
    """All runs: (outcomes, rows of goodput, seconds of a warm undisturbed run)."""
    corpus(folder)
    (folder / "runs").mkdir()
    rng = random.Random(args.seed)
    for name in ("cold", "whole"):  # the first makes the token cache and compiles
        whole = folder / "runs" / name
        began = time.monotonic()
        if wait(start(config(folder, name, args.steps, []), whole), None):
            raise SystemExit(f"the undisturbed run fails: {last_line(whole.with_suffix('.log'))}")
        typical = time.monotonic() - began
    outcomes, rows = [], []
    for index, plan in enumerate(drawn(args.kills, args.steps, rng)):
        outcome = disturbed(folder, f"run-{index}", args.steps, plan, rng, typical)
        compare(whole, folder / "runs" / outcome.name, outcome)
        outcomes.append(outcome)
        said = "; ".join(outcome.wrong) or "equal"
        print(f"{outcome.name}: {' '.join(plan)}: {outcome.deaths} deaths, {outcome.seconds:.1f} s, {said}", flush=True)
    for every in args.every:
        row, outcome = goodput(folder, every, args.steps, whole, typical)
        rows.append(row)
        outcomes.append(outcome)
    return outcomes, rows, typical


def import_all() -> None:
    """Imports the modules of workers. Raises SystemExit if forking is no longer safe."""
    for name in ("jaxtrain.api.trainer", "jaxtrain.checkpoint.checkpointer", "jaxtrain.data.dataset"):
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:  # a JAX backend would have some
        raise SystemExit(f"{threads} threads after importing: workers cannot be forked safely")


if __name__ == "__main__":
    main()
