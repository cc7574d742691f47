"""What `jaxtrain launch` is asked for: arguments, else the environment, never a guess. No JAX."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.errors import UserError
from jaxtrain.launch.agent import Place
from jaxtrain.launch.policy import Policy

LOOPBACK = "127.0.0.1"

# argument -> names in the environment, tried in this order.
NAMES = {
    "nodes": ("JAXTRAIN_NODES", "SLURM_NNODES"),
    "node": ("JAXTRAIN_NODE", "SLURM_NODEID"),
    "coordinator": ("JAXTRAIN_COORDINATOR",),
    "processes": ("JAXTRAIN_PROCESSES",),
    "devices_per_process": ("JAXTRAIN_DEVICES_PER_PROCESS",),
    "host": ("JAXTRAIN_HOST",),
}


LEAST = {"spares": 0, "max_restarts": 0, "memory": 0, "max_failures": 1, "collective_timeout": 1}


@dataclass(frozen=True)
class Options:
    """One agent and, on node 0, the leader and its job. `deadline` is the workers' own, see `jaxtrain train`."""

    where: str
    source: str
    overrides: tuple[str, ...]
    devices: int | None
    fallbacks: tuple[tuple[str, ...], ...]
    place: Place
    policy: Policy
    deadline: float | None = None


def parse_options(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Options:
    """Checked options. Raises UserError, in one line, for what is missing or wrong."""
    is_local = args.where == "local"
    at = {"nodes": 1, "node": 0} if is_local else {name: _number(args, name, environ) for name in ("nodes", "node")}
    slots = _number(args, "processes", environ)
    each = _text(args, "devices_per_process", environ, required=False)
    devices = _whole("devices_per_process", each) if each else None
    for name, least in LEAST.items():
        if getattr(args, name) < least:
            raise UserError(f"launch: {_flag(name)} {getattr(args, name)}: expected at least {least}")
    for name in ("backoff", "heartbeat", "join_timeout", "stop_timeout"):
        if not 0 < getattr(args, name) < math.inf:
            raise UserError(f"launch: {_flag(name)} {getattr(args, name):g}: expected seconds above 0")
    if args.deadline is not None and not 0 <= args.deadline < math.inf:
        raise UserError(f"launch: --deadline {args.deadline:g}: expected seconds, or 0 for none")
    if at["nodes"] < 1 or slots < 1 or (devices is not None and devices < 1):
        raise UserError("launch: expected at least 1 node, 1 process and 1 device of each")
    if at["node"] < 0:
        raise UserError(f"launch: --node {at['node']}: expected a number from 0")
    if args.spares >= at["nodes"] * slots:
        raise UserError(f"launch: --spares {args.spares}: expected fewer than the {at['nodes'] * slots} processes")
    host, port = (LOOPBACK, 0) if is_local else _address(_text(args, "coordinator", environ))
    reached = LOOPBACK if is_local else _text(args, "host", environ, required=False) or (host if not at["node"] else "")
    patience = {"heartbeat": args.heartbeat, "join_timeout": args.join_timeout}
    place = Place(
        at["node"], slots, (host, port), reached, **patience, collective_timeout=args.collective_timeout,
        memory=args.memory > 0,
    )  # fmt: skip
    policy = Policy(
        at["nodes"], args.spares, args.max_restarts, args.max_failures, args.backoff, **patience,
        stop_timeout=args.stop_timeout, memory=args.memory,
    )  # fmt: skip
    fallbacks = tuple(tuple(group.split()) for group in args.fallback)
    return Options(args.where, args.config, tuple(args.overrides), devices, fallbacks, place, policy, args.deadline)


def resume_command(chosen: Options, directory: str) -> str:
    """The command line that goes on with the run."""
    given = [f"--processes={chosen.place.slots}"]
    given += [f"--devices-per-process={chosen.devices}"] if chosen.devices is not None else []
    given += [f"--memory={chosen.policy.memory}"] if chosen.policy.memory else []
    given += [f"--deadline={chosen.deadline:g}"] if chosen.deadline is not None else []
    given += [f"--fallback={' '.join(group)}" for group in chosen.fallbacks]
    return shlex.join(["jaxtrain", "launch", chosen.where, *given, directory])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(args: argparse.Namespace, name: str, environ: Mapping[str, str], required: bool = True) -> str:
    """An argument, else its name in the environment; empty where neither is there and need not be."""
    given = getattr(args, name)
    found = [str(given)] if given is not None else [environ[key] for key in NAMES[name] if environ.get(key)]
    if not found and required:
        raise UserError(f"launch: expected {_flag(name)}, or {' or '.join(NAMES[name])} in the environment")
    return found[0] if found else ""


def _number(args: argparse.Namespace, name: str, environ: Mapping[str, str]) -> int:
    return _whole(name, _text(args, name, environ))


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"launch: {_flag(name)}: expected a number; found {text!r}") from None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"launch: --coordinator: expected HOST:PORT such as 10.0.0.1:29400; found {text!r}")
    return host.strip("[]"), int(port)
