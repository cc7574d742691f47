"""Supervisor of one node: its agent and, on node 0 or with a store on every node, a leader process beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from jaxtrain.api.launched_script import RUN
from jaxtrain.io.addresses import HeldPort
from jaxtrain.io.authenticated import new_secret
from jaxtrain.launch.agent import Agent, WorkerCommand
from jaxtrain.launch.job import ElasticJob, described, open_job, script_command
from jaxtrain.launch.job_secret import published_secret, secret_folder, secret_reader, shared_secret
from jaxtrain.launch.leadership.lead import LeaderSettings
from jaxtrain.launch.leadership.lease import StoredLeader, newest_decision, open_job_store, own_address
from jaxtrain.launch.leadership.link import FixedLeader, LeaderLink
from jaxtrain.launch.leadership.process import LeaderProcess
from jaxtrain.launch.options import LaunchOptions
from jaxtrain.launch.worker_logs import Terminal

CONNECT_SHARE = 0.25  # of the heartbeat: seconds for one attempt to reach the leader
SILENCE_SHARE = 0.25  # of the heartbeat: seconds after which a silent leader process is started again
MIN_SILENCE = 2.0  # the same, at least
STORE_SILENCE = 20.0  # the same, at least, of one that may wait for its store


def worker_command(deadline: float | None, script: Sequence[str] = ()) -> WorkerCommand:
    """Builds the command line of a worker.

    Args:
        deadline: seconds that a step or its data may hang; None: derived from measured step times.
        script: a user's command, in place of jaxtrain's own.
    """
    options = [] if deadline is None else [f"--deadline={deadline!r}"]

    def build(directory: str) -> Sequence[str]:
        if script:
            return script_command(script, RUN, directory)
        return [sys.executable, "-m", "jaxtrain.cli.worker", str(os.getpid()), "resume", directory, *options]

    return build


def supervise(options: LaunchOptions, terminal: Terminal) -> tuple[int, str | None]:
    """Trains until the job ends. Returns the exit code and, on a node that may lead, RUN_DIR.

    Raises:
        UserError: bad input; no process was started.
    """
    if options.script and not options.source:
        with described(options.script) as config:
            return supervise(replace(options, source=config), terminal)
    command = worker_command(options.deadline, options.script)
    if options.agent.node != 0 and not options.agent.store:
        reader = secret_reader(secret_folder(options.source, options.overrides))
        link = LeaderLink(_fixed(options), reader, CONNECT_SHARE * options.agent.heartbeat)
        return Agent(options.agent, command, terminal, link).run(), None
    processes = options.policy.nodes * options.agent.slots - options.policy.spares
    job = open_job(
        options.source, options.overrides, processes, options.devices_per_process, options.fallbacks, options.continues
    )
    terminal.show(f"launch  {job.directory}")
    leader_command = [sys.executable, "-m", "jaxtrain.cli.leader", str(os.getpid())]
    with _secret(options) as secret:
        code = run_leading_node(job, options, command, leader_command, terminal, secret)
    return code, str(job.directory)


def run_leading_node(
    job: ElasticJob,
    options: LaunchOptions,
    command: WorkerCommand,
    leader_command: Sequence[str],
    terminal: Terminal,
    secret: str,
) -> int:
    """Runs an agent with a leader process beside it until the job ends. Returns the exit code.

    Args:
        job: the run to launch.
        options: options of this node.
        command: command line of a worker.
        leader_command: command line of the leader process.
        terminal: shows lines.
        secret: secret of the job.
    """
    agent, heartbeat, held = options.agent, options.agent.heartbeat, HeldPort()
    if agent.store:
        agent = replace(agent, host=agent.host or own_address(agent.store))
        jobs = open_job_store(agent.store, job.directory)
        host, port, finder, begun = agent.host, 0, StoredLeader(jobs), newest_decision(jobs)
    else:
        assert agent.leader is not None
        host, port = agent.leader[0], agent.leader[1] or held.number
        agent = replace(agent, leader=(host, port))
        finder, begun = FixedLeader((host, port)), 0
    settings = LeaderSettings(new_secret(), host, port, secret, options.policy, agent.store, begun)
    described = json.dumps({"job": job.as_json(), "settings": settings.as_text()})
    silence = max(SILENCE_SHARE * heartbeat, STORE_SILENCE if agent.store else MIN_SILENCE)
    leader = LeaderProcess(leader_command, described, silence, terminal)
    link = LeaderLink(finder, lambda: secret, CONNECT_SHARE * heartbeat)
    try:
        return Agent(agent, command, terminal, link, leader).run()
    finally:
        held.close()  # a leader that is started again listens there again


def _fixed(options: LaunchOptions) -> FixedLeader:
    assert options.agent.leader is not None
    return FixedLeader(options.agent.leader)


@contextmanager
def _secret(options: LaunchOptions) -> Iterator[str]:
    folder = None if options.where == "local" else secret_folder(options.source, options.overrides)
    if options.agent.store and folder is not None:
        yield shared_secret(folder)
    else:
        with published_secret(folder) as secret:
            yield secret
