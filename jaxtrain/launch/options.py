"""Options of `jaxtrain launch`: from arguments, else from the environment."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.distributed.etcd import open_etcd
from jaxtrain.errors import UserError
from jaxtrain.launch.agent import AgentConfig
from jaxtrain.launch.scheduler import find_scheduler_job
from jaxtrain.launch.types import RestartPolicy

LOOPBACK = "127.0.0.1"

# Each argument has an environment variable, JAXTRAIN_ and its name. A scheduler's own variables come after both.
FROM_SCHEDULER = ("nodes", "node", "coordinator")

MINIMUM = {"spares": 0, "max_restarts": 0, "memory": 0, "max_failures": 1, "collective_timeout": 1}


@dataclass(frozen=True)
class LaunchOptions:
    """Options of one supervisor. `deadline` is passed on to the workers, see `jaxtrain train --help`."""

    where: str
    source: str
    overrides: tuple[str, ...]
    devices_per_process: int | None
    fallbacks: tuple[tuple[str, ...], ...]
    agent: AgentConfig
    policy: RestartPolicy
    deadline: float | None = None
    continues: bool = True  # the run in DIR/NAME, if there is one of the same config
    script: tuple[str, ...] = ()  # a user's command in place of a config


def parse_options(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> LaunchOptions:
    """Checks and completes the arguments. Raises UserError, in one line, for a missing or wrong one."""
    is_local = args.where == "local"
    _check_source(args)
    environ = {**_scheduled(environ), **environ}
    nodes, node = (1, 0) if is_local else (_integer(name, _text(args, name, environ)) for name in ("nodes", "node"))
    slots = _integer("processes", _text(args, "processes", environ))
    per_process = _text(args, "devices_per_process", environ, required=False)
    devices = _integer("devices_per_process", per_process) if per_process else None
    for name, minimum in MINIMUM.items():
        if getattr(args, name) < minimum:
            raise UserError(f"launch: {flag(name)} {getattr(args, name)}: expected at least {minimum}")
    for name in ("backoff", "heartbeat", "join_timeout", "stop_timeout"):
        if not 0 < getattr(args, name) < math.inf:
            raise UserError(f"launch: {flag(name)} {getattr(args, name):g}: expected seconds above 0")
    if args.deadline is not None and not 0 <= args.deadline < math.inf:
        raise UserError(f"launch: --deadline {args.deadline:g}: expected seconds, or 0 for none")
    if nodes < 1 or slots < 1 or (devices is not None and devices < 1):
        raise UserError("launch: expected at least 1 node, 1 process and 1 device per process")
    if node < 0:
        raise UserError(f"launch: --node {node}: expected a number from 0")
    if args.spares >= nodes * slots:
        raise UserError(f"launch: --spares {args.spares}: expected fewer than the {nodes * slots} processes")
    store = "" if is_local else _text(args, "store", environ, required=False)
    if store and args.resume == "never":
        raise UserError("launch: --store: expected --resume auto, because all nodes must find the same run")
    if store:
        open_etcd(store)  # refuses what is no URL
    leader = None if store else (LOOPBACK, 0) if is_local else _address(_text(args, "coordinator", environ))
    own_host = LOOPBACK if is_local else _text(args, "host", environ, required=False)
    if leader is not None and node == 0:
        own_host = own_host or leader[0]
    timeouts = {"heartbeat": args.heartbeat, "join_timeout": args.join_timeout}
    agent = AgentConfig(
        node, slots, leader, own_host, **timeouts, collective_timeout=args.collective_timeout,
        serves_memory=args.memory > 0, store=store,
    )  # fmt: skip
    policy = RestartPolicy(
        nodes, args.spares, args.max_restarts, args.max_failures, args.backoff, **timeouts,
        stop_timeout=args.stop_timeout, memory_every=args.memory,
    )  # fmt: skip
    fallbacks = tuple(tuple(group.split()) for group in args.fallback)
    return LaunchOptions(
        args.where, args.config or "", tuple(args.overrides), devices, fallbacks, agent, policy, args.deadline,
        continues=args.resume != "never", script=tuple(args.command),
    )  # fmt: skip


def resume_command(options: LaunchOptions, directory: str) -> str:
    """Returns the command line that resumes the run."""
    given = [f"--processes={options.agent.slots}"]
    given += [f"--devices-per-process={options.devices_per_process}"] if options.devices_per_process is not None else []
    given += [f"--memory={options.policy.memory_every}"] if options.policy.memory_every else []
    given += [f"--deadline={options.deadline:g}"] if options.deadline is not None else []
    given += [f"--fallback={' '.join(group)}" for group in options.fallbacks]
    source = ["--", *options.script] if options.script else [directory]
    return shlex.join(["jaxtrain", "launch", options.where, *given, *source])


def _check_source(args: argparse.Namespace) -> None:
    """Raises UserError unless either a config or a command is given."""
    if args.command and (args.config is not None or args.overrides):
        raise UserError(f"launch: {args.config} and a command; expected the config in the script, or no command")
    if args.command and args.deadline is not None:
        raise UserError("launch: --deadline with a command; expected `deadline=` of the script's Trainer")
    if args.config is None and not args.command:
        raise UserError("launch: expected a config, a run, or a command after `--`, such as -- python train.py")


def _scheduled(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what a scheduler's variables say, under the names of jaxtrain's own."""
    job = find_scheduler_job(environ)
    coordinator = None if job.host is None else f"{job.host}:{job.port}"
    values = {"nodes": job.nodes, "node": job.node, "coordinator": coordinator}
    return {_variable(name): str(value) for name, value in values.items() if value is not None}


def _variable(name: str) -> str:
    return f"JAXTRAIN_{name.upper()}"


def flag(name: str) -> str:
    """Returns an option as it is written."""
    return f"--{name.replace('_', '-')}"


def _text(args: argparse.Namespace, name: str, environ: Mapping[str, str], required: bool = True) -> str:
    """Returns an argument, else its environment variable, else an empty text if it is not required."""
    given, variable = getattr(args, name), _variable(name)
    text = environ.get(variable, "") if given is None else str(given)
    if not text and required:
        scheduler = ", or a scheduler's variables" if name in FROM_SCHEDULER else ""
        raise UserError(f"launch: expected {flag(name)}, or {variable}{scheduler} in the environment")
    return text


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"launch: {flag(name)}: expected a number; found {text!r}") from None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    try:
        host.encode("idna")  # which fails for an empty or long part of a name
        is_valid = bool(host) and port.isdecimal() and 0 < int(port) < 65536
    except UnicodeError:
        is_valid = False
    if not is_valid:
        raise UserError(f"launch: --coordinator: expected HOST:PORT such as 10.0.0.1:29400; found {text!r}")
    return host.strip("[]"), int(port)
