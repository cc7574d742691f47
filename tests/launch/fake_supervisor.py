"""`jaxtrain launch` with workers that only follow FOLDER/plan.json: `python fake_supervisor.py FOLDER ARGUMENTS`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from jaxtrain.cli.arguments import COMMANDS
from jaxtrain.config import Config
from jaxtrain.errors import UserError
from jaxtrain.io.system import exit_with_parent
from jaxtrain.launch.agent import Agent
from jaxtrain.launch.job_secret import published_secret, secret_reader, shared_secret
from jaxtrain.launch.leadership.lead import LeaderSettings, lead
from jaxtrain.launch.leadership.link import FixedLeader, LeaderLink
from jaxtrain.launch.options import parse_options
from jaxtrain.launch.supervisor import run_leading_node
from jaxtrain.launch.types import Placement
from jaxtrain.launch.worker_logs import Terminal

# plan.json maps GENERATION.RANK or GENERATION to the action of a worker; otherwise it runs until SIGTERM.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from jaxtrain.errors import UserError
from jaxtrain.io.system import exit_with_parent
exit_with_parent(int(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
folder, rank, generation = Path(sys.argv[2]), os.environ["JAX_PROCESS_ID"], os.environ["JAXTRAIN_GENERATION"]
plan = json.loads((folder / "plan.json").read_text())
action = plan.get(f"{generation}.{rank}", plan.get(generation, "run"))
if action == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
written = folder / f"new-{generation}-{rank}"  # renamed, since a worker may be killed while it writes
written.write_text(f"{os.getpid()} {os.environ['JAX_NUM_PROCESSES']}")
written.rename(folder / f"pid-{generation}-{rank}")
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
if action == "save":
    from jaxtrain.distributed.save_fence import save_fence
    fence, step, until = save_fence(), 0, time.monotonic() + 60
    while time.monotonic() < until and rank == "0":
        step += 1
        try:
            fence.record(step, f"{step}.generation-{generation}")
            result = "counts"
        except Exception as error:
            result = type(error).__name__
        with open(folder / f"saves-{generation}", "a") as file:
            print(time.time(), result, file=file)
        time.sleep(0.1)
time.sleep(60)
"""


class FakeJob:
    """Job that fits any number of processes and never saves."""

    is_simulated = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def as_json(self) -> dict:
        return {}

    def largest_placement(self, available: int) -> Placement | None:
        return Placement(available, available, (), "data", Config()) if available else None

    def write_config(self, placement: Placement) -> None:
        del placement

    def newest_checkpoint(self) -> int | None:
        return None


def command(directory: str) -> list[str]:
    return [sys.executable, "-c", WORKER, str(os.getpid()), directory]


def main() -> int:
    folder, terminal = Path(sys.argv[1]), Terminal()
    try:
        if sys.argv[2] == "lead":
            exit_with_parent(int(sys.argv[3]))
            lead(FakeJob(folder), LeaderSettings.from_text(json.load(sys.stdin)["settings"]), terminal.show)
            return 0
        parser = argparse.ArgumentParser()
        COMMANDS["launch"].add_arguments(parser)
        options = parse_options(parser.parse_args(sys.argv[2:]))
        if options.agent.node == 0 or options.agent.store:
            leader_command = [sys.executable, __file__, str(folder), "lead", str(os.getpid())]
            with nullcontext(shared_secret(folder)) if options.agent.store else published_secret(folder) as secret:
                return run_leading_node(FakeJob(folder), options, command, leader_command, terminal, secret)
        link = LeaderLink(FixedLeader(options.agent.leader), secret_reader(folder), 1.0)
        return Agent(options.agent, command, terminal, link).run()
    except UserError as error:
        terminal.show(f"jaxtrain: {error}", error=True)
        return 2
    finally:
        terminal.close()


if __name__ == "__main__":
    sys.exit(main())
