"""Trains for 20,000 steps, once in one process and once in 201, and watches what could grow.

    python benchmarks/soak.py [--steps 20000] [--resumes 200] [--out soak.json]

A tiny decoder with a checkpoint every 50 steps, a validation every 100, TensorBoard, and a report now and then. The
disturbed run is stopped by SIGTERM, by SIGHUP and by SIGKILL in turn, and continued by the same command line. Memory,
file descriptors and threads are those of the process that trains, seen from outside; files are those of the run folder,
without logs, and of its TMPDIR; log bytes are all that the run writes but for checkpoints.

Both runs must have the same losses, bit by bit, once for each step. Whatever is counted must not grow from the second
quarter of the samples to the last one: memory by less than 3%, log bytes of a step and files by less than 5% (a save
that a signal interrupts has a few more or fewer), the others not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from chaos import corpus, litter, losses, read

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
LIMIT = 3600.0  # seconds of one process
GROWTH = {"memory_mib": 1.03, "descriptors": 1.0, "threads": 1.0, "files": 1.05, "log_bytes_per_step": 1.05}


class Run:
    """One run, by the command line `jaxtrain train`."""

    def __init__(self, folder: Path, name: str, steps: int) -> None:
        self.folder = folder / "runs" / name
        self.temporary = folder / f"tmp-{name}"
        self.temporary.mkdir()
        self.log = folder / f"{name}.log"
        self.environ = os.environ | {
            "TMPDIR": str(self.temporary), "XDG_CACHE_HOME": str(folder / "xdg"), "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        config = folder / f"{name}.yaml"
        config.write_text(json.dumps({
            "name": name, "dir": str(folder / "runs"), "steps": steps, "precision": "fp32", "simulate": 1,
            "model": {"embed": 16, "layers": 1, "heads": 2, "mlp": 32},
            "data": {"sources": [{"path": str(folder / "text")}], "sequence": 32, "global_batch": 2,
                     "validation_fraction": 0.1, "cache_dir": str(folder / "cache"), "workers": 1},
            "optimizer": {"lr": 1e-3}, "schedule": {"name": "constant"}, "loss": {"vocab_chunks": 1},
            "checkpoint": {"every": 50, "keep_best": 1}, "eval": {"every": 100, "batches": 1},
        }))  # fmt: skip
        self.command = [sys.executable, "-m", "jaxtrain.cli.main", "train", config, "--resume", "auto"]

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log, env=self.environ)

    def step(self) -> int:
        """Newest step in metrics.jsonl."""
        try:
            with open(self.folder / "metrics.jsonl", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().splitlines()
        except OSError:
            return 0
        for line in reversed(lines):
            try:
                return json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue
        return 0

    def files(self) -> int:
        """Files of the run folder that are no logs, and all files of its TMPDIR."""
        here = [path for path in self.folder.rglob("*") if path.is_file() and "tensorboard" not in path.parts]
        return sum(path.suffix != ".jsonl" for path in here) + sum(path.is_file() for path in self.temporary.rglob("*"))

    def log_bytes(self) -> int:
        """Bytes of what grows with the steps: all files but checkpoints, and the terminal."""
        here = [path for path in self.folder.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
        return sum(path.stat().st_size for path in here) + self.log.stat().st_size


def observe(run: Run, pid: int) -> dict[str, Any]:
    """Counts what a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads"))
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return {"step": run.step(), "memory_mib": resident / 1024, "descriptors": descriptors, "threads": threads}


def long(run: Run, steps: int, samples: int) -> list[dict[str, Any]]:
    """Trains in one process. Returns a sample for each part of the steps."""
    found, process, bytes_before = [], run.start(), 0
    while process.poll() is None:
        if run.step() >= (len(found) + 1) * steps // (samples + 1) and len(found) < samples:
            sample = observe(run, process.pid)
            grown, done = run.log_bytes() - bytes_before, sample["step"] - (found[-1]["step"] if found else 0)
            bytes_before += grown
            found.append(sample | {"log_bytes_per_step": grown / done})
        time.sleep(0.02)
    check(run, process.returncode, 0)
    return found


def check(run: Run, code: int, *wanted: int) -> None:
    if code not in wanted:
        raise SystemExit(f"a process ended with {code}: {run.log.read_text()[-2000:]}")


def disturbed(run: Run, steps: int, resumes: int) -> list[dict[str, Any]]:
    """Trains in many processes. Returns a sample for each."""
    found, bytes_before = [], 0
    for index in range(resumes):
        process, target = run.start(), (index + 1) * steps // (resumes + 1)
        begun, first = time.monotonic(), run.step()
        started: float | None = None
        while process.poll() is None and (step := run.step()) < target:
            if started is None and step > first:
                started = time.monotonic() - begun
            time.sleep(0.01)
        check(run, process.poll() or 0, 0)
        sample = observe(run, process.pid)
        process.send_signal(SIGNALS[index % len(SIGNALS)])
        code = process.wait(LIMIT)
        check(run, code, 75, -signal.SIGKILL)
        if index % 20 == 19:
            subprocess.run([sys.executable, "-m", "jaxtrain.cli.main", "report", run.folder], check=True,
                           stdout=subprocess.DEVNULL, env=run.environ)  # fmt: skip
        grown, done = run.log_bytes() - bytes_before, sample["step"] - first
        bytes_before += grown
        found.append(sample | {"first_step_s": started, "files": run.files(), "log_bytes_per_step": grown / done})
        if index % 10 == 0:
            print(f"{index} resumes, step {sample['step']}", flush=True)
    process = run.start()
    check(run, process.wait(LIMIT), 0)
    return found


def quarters(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each quarter of the samples."""
    size = max(1, len(samples) // 4)
    parts = [samples[i * size : (i + 1) * size] for i in range(4)]
    names = [name for name in samples[0] if name != "step"]
    rows = []
    for part in filter(None, parts):
        values = {name: [s[name] for s in part if s[name] is not None] for name in names}
        rows.append({"to step": part[-1]["step"]} | {n: statistics.median(v) for n, v in values.items() if v})
    return rows


def grown(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Names what grew from the second quarter to the last one."""
    wrong = []
    for key, factor in GROWTH.items():
        if key in rows[0] and len(rows) == 4 and rows[3][key] > rows[1][key] * factor:
            wrong.append(f"{name}: {key} grew from {rows[1][key]:.5g} to {rows[3][key]:.5g}")
    return wrong


def main() -> None:
    """Runs both, compares, prints."""
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--resumes", type=int, default=200)
    args = parser.parse_args()
    if args.quick:
        args.steps, args.resumes = 120, 1
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs would inherit to ignore it
    print(common.title(about := common.machine("orbax-checkpoint")))
    with tempfile.TemporaryDirectory() as name:
        results, wrong = soak(Path(name), args)
    for line in wrong:
        print(f"WRONG {line}")
    common.report("soak", args, results | {"wrong": wrong}, about)
    sys.exit(bool(wrong))


def soak(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    corpus(folder)
    whole, parts = Run(folder, "whole", args.steps), Run(folder, "parts", args.steps)
    began = time.monotonic()
    results = {"one process": quarters(long(whole, args.steps, 4 if args.quick else 40))}
    print(f"{time.monotonic() - began:.0f} s", common.table(results["one process"]), sep="\n", flush=True)
    results["many processes"] = quarters(disturbed(parts, args.steps, args.resumes))
    print(f"{time.monotonic() - began:.0f} s", common.table(results["many processes"]), sep="\n", flush=True)
    wrong = [line for name, rows in results.items() for line in grown(name, rows)] if not args.quick else []
    wrong += litter(parts.folder) + litter(whole.folder)
    if losses(whole.folder) != losses(parts.folder):
        wrong.append("other losses")
    records = [[record["step"] for record in read(run.folder / "metrics.jsonl")] for run in (whole, parts)]
    if records[0] != records[1]:
        wrong.append("other records in metrics.jsonl")
    return results, wrong


if __name__ == "__main__":
    main()
