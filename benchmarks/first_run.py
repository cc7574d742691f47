"""A new user's first run, from an empty environment, with the time of each part.

For each interpreter: builds the wheel, installs it alone into an empty environment, writes a model of its own with
`jaxtrain init`, trains, stops with Ctrl-C, resumes, and reads the report. Prints a table.

    python benchmarks/first_run.py [--python python3.11 --python python3.13] [--json FILE] [--template own-model]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAVED = 75  # exit code of a run that a signal ended after it saved
STEPS, STOP = 60, 20


def interpreters() -> list[str]:
    """Interpreters of 3.11 and 3.13 that run here; those of pyenv, too."""
    found = []
    for version in ("3.11", "3.13"):
        pyenv = sorted(
            Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/{version}.*/bin/python")
        )
        for python in (f"python{version}", *map(str, pyenv)):
            if (
                shutil.which(python)
                and not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode
            ):
                found.append(python)
                break
    return found


class FirstRun:
    """The steps of a new user in an empty folder with an empty environment."""

    def __init__(self, python: str, wheel: Path, folder: Path, template: str):
        self.wheel, self.folder, self.template = wheel, folder, template
        self.bin = folder / "venv" / "bin"
        self.python, self.seconds = python, {}
        names = ("PYTHONPATH", "VIRTUAL_ENV", "JAX_PLATFORMS", "XLA_FLAGS")
        self.env = {name: value for name, value in os.environ.items() if name not in names}
        self.env["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        self.env["XDG_CACHE_HOME"] = self.env["HOME"] = str(folder / "home")  # empty caches, too

    def call(self, part: str, *command: str, code: int = 0) -> str:
        """Runs a command in the folder and adds its seconds. Returns what it printed."""
        begin = time.perf_counter()
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=1200, check=False
        )
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
        if done.returncode != code:
            raise SystemExit(
                f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.stdout

    def run(self) -> dict[str, Any]:
        """Does all of it. Returns the seconds of each part and the losses."""
        self.call("environment", self.python, "-m", "venv", str(self.folder / "venv"))
        self.call("install", str(self.bin / "pip"), "install", "-q", str(self.wheel))
        version = self.call("version", "jaxtrain", "--version").strip()
        self.call("init", "jaxtrain", "init", "mine", "--template", self.template)
        self.train_until(STOP)
        run = self.folder / "runs" / "mine"
        self.call("resume", "jaxtrain", "resume", "runs/mine")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [record["step"] for record in records]
        assert steps == list(range(1, STEPS + 1)), f"expected each of the {STEPS} steps once; found {steps}"
        text = self.call("report", "jaxtrain", "report", "runs/mine")
        assert "1 restart" in text, text[:800]
        return {"version": version, "seconds": self.seconds, "first": records[0]["loss"], "last": records[-1]["loss"]}

    def train_until(self, step: int) -> None:
        """Trains, and presses Ctrl-C after a step; the time to the first step is a part of its own."""
        begin = time.perf_counter()
        command = ["jaxtrain", "train", "mine.yaml", f"steps={STEPS}", "eval.every=null", "checkpoint.every=null"]
        with (self.folder / "train.log").open("w") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=subprocess.STDOUT)
            file = self.folder / "runs" / "mine" / "metrics.jsonl"
            try:
                self.wait(process, lambda: file.exists() and file.stat().st_size > 0)
                self.seconds["to the first step"] = time.perf_counter() - begin
                self.wait(process, lambda: file.read_text().count("\n") >= step)
                process.send_signal(signal.SIGINT)
                code = process.wait(timeout=300)
            finally:
                process.kill()
        self.seconds["train, stop"] = time.perf_counter() - begin
        if code != SAVED:
            raise SystemExit(
                f"train: exit code {code}; expected {SAVED}\n{(self.folder / 'train.log').read_text()[-3000:]}"
            )

    def wait(self, process: subprocess.Popen[Any], is_done: Callable[[], bool], seconds: float = 900.0) -> None:
        """Waits until something is done. Raises SystemExit if the process ends before, or it takes too long."""
        end = time.monotonic() + seconds
        while not is_done():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"train: ended early\n{self.log()}")
            time.sleep(0.05)


def main(arguments: list[str] | None = None) -> int:
    """Measures all interpreters and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="an interpreter; may be repeated (3.11 and 3.13)")
    parser.add_argument("--template", default="own-model", help="of `jaxtrain init` (own-model)")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(arguments)
    sys.path.append(str(ROOT / "tests" / "support"))
    from release import build

    results = {}
    with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
        wheel = build(ROOT, Path(folder) / "dist")[1]
        for index, python in enumerate(args.python or interpreters()):
            place = Path(folder) / str(index)
            (place / "home").mkdir(parents=True)
            found = FirstRun(python, wheel, place, args.template).run()
            results[found["version"].rpartition("Python ")[2]] = found
            print(found["version"], f"loss {found['first']:.3f} -> {found['last']:.3f}")
            for part, seconds in found["seconds"].items():
                print(f"  {part:<18} {seconds:6.1f} s")
            print(
                f"  {'all':<18} {sum(found['seconds'].values()) - found['seconds']['to the first step']:6.1f} s",
                flush=True,
            )
    if not results:
        raise SystemExit("first_run: neither Python 3.11 nor 3.13 runs here; expected --python")
    if args.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        args.json.write_text(
            json.dumps({"machine": machine, "template": args.template, "runs": results}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
