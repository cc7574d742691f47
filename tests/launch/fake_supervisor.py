"""`jaxtrain launch` with workers that only follow FOLDER/plan.json: `python fake_supervisor.py FOLDER ARGUMENTS`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jaxtrain.cli.arguments import COMMANDS
from jaxtrain.config import Config
from jaxtrain.launch.agent import Agent
from jaxtrain.launch.job_secret import published_secret, secret_reader
from jaxtrain.launch.options import parse_options
from jaxtrain.launch.supervisor import run_leader
from jaxtrain.launch.types import Placement
from jaxtrain.launch.worker_logs import Terminal

# plan.json maps GENERATION.RANK or GENERATION to the action of a worker; otherwise it runs until SIGTERM.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from jaxtrain.io.system import exit_with_parent
exit_with_parent(int(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
folder, rank, generation = Path(sys.argv[2]), os.environ["JAX_PROCESS_ID"], os.environ["JAXTRAIN_GENERATION"]
plan = json.loads((folder / "plan.json").read_text())
action = plan.get(f"{generation}.{rank}", plan.get(generation, "run"))
if action == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"pid-{generation}-{rank}").write_text(f"{os.getpid()} {os.environ['JAX_NUM_PROCESSES']}")
print(f"worker {rank} of generation {generation}", flush=True)
while not all((folder / f"pid-{generation}-{i}").exists() for i in range(int(os.environ["JAX_NUM_PROCESSES"]))):
    time.sleep(0.01)
time.sleep(0.05)
if action == "raise":
    raise KeyError("of a worker")
if action.startswith("exit"):
    sys.exit(int(action.split()[1]))
if action == "kill":
    os.kill(os.getpid(), 9)
time.sleep(60)
"""


class FakeJob:
    """Job that fits any number of processes and never saves."""

    is_simulated = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def largest_placement(self, available: int) -> Placement | None:
        return Placement(available, available, (), "data", Config()) if available else None

    def write_config(self, placement: Placement) -> None:
        del placement

    def newest_checkpoint(self) -> int | None:
        return None


def command(directory: str) -> list[str]:
    return [sys.executable, "-c", WORKER, str(os.getpid()), directory]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    COMMANDS["launch"].add_arguments(parser)
    options, terminal, folder = parse_options(parser.parse_args(sys.argv[2:])), Terminal(), Path(sys.argv[1])
    if options.agent.node == 0:
        with published_secret(folder) as secret:
            code = run_leader(FakeJob(folder), options.policy, options, command, terminal, secret)
    else:
        code = Agent(options.agent, command, terminal, secret_reader(folder)).run()
    terminal.close()
    sys.exit(code)
