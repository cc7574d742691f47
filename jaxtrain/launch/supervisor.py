"""One supervisor: this node's agent and, on node 0, the leader beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from jaxtrain.launch.agent import Agent, Command
from jaxtrain.launch.job import open_job
from jaxtrain.launch.leader import Leader
from jaxtrain.launch.options import Options
from jaxtrain.launch.policy import Policy, Run
from jaxtrain.launch.server import Server, last_generation
from jaxtrain.launch.worker_logs import Terminal

NEAR = 5.0  # seconds to look for a leader in this very process


def command(deadline: float | None) -> Command:
    """The command of a worker. `deadline`: seconds a step or its data may hang; None: as measured."""
    more = [] if deadline is None else [f"--deadline={deadline!r}"]

    def of(directory: str) -> Sequence[str]:
        return [sys.executable, "-m", "jaxtrain.cli.worker", str(os.getpid()), directory, *more]

    return of


def supervise(chosen: Options, terminal: Terminal) -> tuple[int, str | None]:
    """Trains until the job ends: (exit code, RUN_DIR where the leader is here).

    Raises:
        UserError: bad input; no process was started.
    """
    worker = command(chosen.deadline)
    if chosen.place.node != 0:
        return Agent(chosen.place, worker, terminal).run(), None
    policy = chosen.policy
    total = policy.nodes * chosen.place.slots
    job = open_job(chosen.source, chosen.overrides, total - policy.spares, chosen.devices, chosen.fallbacks)
    terminal.show(f"launch  {job.directory}")
    return lead(job, policy, chosen, worker, terminal), str(job.directory)


def lead(job: Run, policy: Policy, chosen: Options, worker: Command, terminal: Terminal) -> int:
    """The leader of a job and the agent of node 0, until the job ends: its exit code."""
    host, port = chosen.place.leader
    leader = Leader(job, policy, generation=last_generation(job.directory))
    server = Server(leader, host, port, terminal.show)
    server.start()
    place = replace(chosen.place, leader=(host, server.port), join_timeout=NEAR)
    code = Agent(place, worker, terminal).run()
    server.join()
    return code
