"""Supervisor of one node: runs its agent and, on node 0, the leader."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from jaxtrain.launch.agent import Agent, WorkerCommand
from jaxtrain.launch.job import ElasticJob, open_job
from jaxtrain.launch.job_secret import published_secret, secret_folder, secret_reader
from jaxtrain.launch.leader import Leader
from jaxtrain.launch.options import LaunchOptions
from jaxtrain.launch.server import LeaderServer, last_generation
from jaxtrain.launch.types import RestartPolicy
from jaxtrain.launch.worker_logs import Terminal

LOCAL_JOIN_TIMEOUT = 5.0  # seconds; the leader runs in the same process


def worker_command(deadline: float | None) -> WorkerCommand:
    """Builds the command line of a worker.

    Args:
        deadline: seconds that a step or its data may hang; None: derived from measured step times.
    """
    options = [] if deadline is None else [f"--deadline={deadline!r}"]

    def build(directory: str) -> Sequence[str]:
        return [sys.executable, "-m", "jaxtrain.cli.worker", str(os.getpid()), directory, *options]

    return build


def supervise(options: LaunchOptions, terminal: Terminal) -> tuple[int, str | None]:
    """Trains until the job ends. Returns the exit code and, on node 0, RUN_DIR.

    Raises:
        UserError: bad input; no process was started.
    """
    command = worker_command(options.deadline)
    if options.agent.node != 0:
        reader = secret_reader(secret_folder(options.source, options.overrides))
        return Agent(options.agent, command, terminal, reader).run(), None
    policy = options.policy
    processes = policy.nodes * options.agent.slots - policy.spares
    job = open_job(
        options.source, options.overrides, processes, options.devices_per_process, options.fallbacks, options.continues
    )
    terminal.show(f"launch  {job.directory}")
    folder = None if options.where == "local" else secret_folder(options.source, options.overrides)
    with published_secret(folder) as secret:
        return run_leader(job, policy, options, command, terminal, secret), str(job.directory)


def run_leader(
    job: ElasticJob,
    policy: RestartPolicy,
    options: LaunchOptions,
    command: WorkerCommand,
    terminal: Terminal,
    secret: str,
) -> int:
    """Runs the leader of a job and the agent of node 0 until the job ends. Returns the exit code."""
    host, port = options.agent.leader
    leader = Leader(job, policy, generation=last_generation(job.directory))
    server = LeaderServer(leader, host, port, secret, terminal.show)
    server.start()
    agent = replace(options.agent, leader=(host, server.port), join_timeout=LOCAL_JOIN_TIMEOUT)
    code = Agent(agent, command, terminal, lambda: secret).run()
    server.join()
    return code
