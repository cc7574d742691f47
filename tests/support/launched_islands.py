"""A run of islands that `jaxtrain launch islands` starts, and what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_islands import CONFIG

from jaxtrain.errors import UserError
from jaxtrain.islands.status import read_status


def clocks(run: Path) -> list[int]:
    """Steps of islands 0 and 1, as their coordinator knows them."""
    try:
        islands = read_status(run)["islands"]
    except UserError:
        return [0, 0]
    return [islands.get(index, {}).get("clock", 0) for index in ("0", "1")]


def parents() -> dict[int, int]:
    """Parents of all processes. `ps` is not asked: it cuts its lines at $COLUMNS."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            found[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    return found


def arguments_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has ended
        return ""


class Launched:
    """A launcher in a session of its own.

    Args:
        folder: of the run and its config.
        overrides: of the config.
        islands: their number.
        options: of the launcher.
    """

    def __init__(self, folder: Path, *overrides: str, islands: int = 2, options: tuple[str, ...] = ()) -> None:
        self.run, config = folder / "run", folder / "config.yaml"
        text = folder / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
        config.write_text(CONFIG.format(dir=folder, text=text))
        command = [
            sys.executable,
            "-m",
            "jaxtrain.cli.main",
            "launch",
            "islands",
            "--islands",
            str(islands),
            *options,
            str(config),
        ]
        other = "127.0.0.1:1"  # of a cluster that the run does not join
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RAY_ADDRESS": other}
        self.process = subprocess.Popen(
            [*command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip

    def finish(self, timeout: float = 300) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def log(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.run / "server/pushes.jsonl").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool], timeout: float = 200) -> None:
        end = time.monotonic() + timeout
        while not condition(self.log()):
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < end, self.log()[-20:]
            time.sleep(0.2)

    def children(self, name: str) -> list[int]:
        """Processes below the launcher whose command line has a text."""
        found = parents()
        below = {self.process.pid}
        while more := {pid for pid, parent in found.items() if parent in below} - below:
            below |= more
        return sorted(pid for pid in below if name in arguments_of(pid))


def losses(run: Path, island: int) -> dict[int, float]:
    lines = (run / f"island-{island}/metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}
