"""Options of `jaxtrain launch islands`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.launch.options import flag

# Options of an island that mean nothing without one of others.
NEEDED = {
    "devices_per_process": ("processes", "nodes"), "node": ("nodes",), "coordinator": ("nodes",), "host": ("nodes",),
}  # fmt: skip


@dataclass(frozen=True)
class IslandsOptions:
    """Options of `jaxtrain launch islands`.

    Attributes:
        source: config, or the folder of a run of islands.
        overrides: `key=value`.
        count: islands in all; None: as the config says.
        here: those of this machine; None: all.
        address: of an existing Ray cluster; None: one is started.
        max_restarts: of an island.
        stop_timeout: seconds that islands have to save.
        collective_timeout: seconds that a collective of CPU devices of an island waits for its other processes.
        continues: the run in DIR/NAME, if there is one of the same config.
        launch: arguments of `jaxtrain launch` of an island with several processes; empty: it is one process.
        processes: of an island, on all its nodes.
    """

    source: str
    overrides: tuple[str, ...]
    count: int | None
    here: tuple[int, ...] | None
    address: str | None = None
    max_restarts: int = 5
    stop_timeout: float = 300.0
    collective_timeout: int = 300
    continues: bool = True
    launch: tuple[str, ...] = ()
    processes: int = 1


def parse_islands(args: argparse.Namespace) -> IslandsOptions:
    """Returns the options of arguments. Raises UserError for a wrong one."""
    if args.config is None or args.command:
        raise UserError("launch: expected a config, or the folder of a run of islands")
    if args.islands is not None and args.islands < 1:
        raise UserError(f"launch: --islands {args.islands}: expected at least 1")
    here = None if args.here is None else args.here.split(",")
    if here is not None and not all(part.isdecimal() for part in here):
        raise UserError(f"launch: --here {args.here}: expected indices of islands, such as 0,1")
    return IslandsOptions(
        args.config, tuple(args.overrides), args.islands, None if here is None else tuple(map(int, here)), args.address,
        args.max_restarts, args.stop_timeout, args.collective_timeout, continues=args.resume != "never",
        launch=_launch(args, here), processes=(args.processes or 1) * (args.nodes or 1),
    )  # fmt: skip


def resume_command(options: IslandsOptions, directory: Path) -> str:
    """Returns the command line that goes on with the run."""
    given = [] if options.address is None else [f"--address={options.address}"]
    given += [] if options.here is None else [f"--here={','.join(map(str, options.here))}"]
    return shlex.join(["jaxtrain", "launch", "islands", *given, *options.launch[1:], str(directory)])


def _launch(args: argparse.Namespace, here: list[str] | None) -> tuple[str, ...]:
    """Returns the arguments of `jaxtrain launch` of an island with several processes or nodes; else none."""
    for name, needed in NEEDED.items():
        if getattr(args, name) is not None and all(getattr(args, each) is None for each in needed):
            expected = " or ".join(flag(each) for each in needed)
            raise UserError(f"launch: {flag(name)} {getattr(args, name)}: expected {expected} with it")
    if args.nodes is not None and (here is None or len(here) > 1):
        expected = "expected --here with the island that has them, such as --here 2"
        raise UserError(f"launch: --nodes {args.nodes}: {expected}")
    if args.processes is None and args.nodes is None:
        return ()
    names = ("processes", "devices_per_process", "nodes", "node", "coordinator", "host")
    given = [f"{flag(name)}={getattr(args, name)}" for name in names if getattr(args, name) is not None]
    return ("local" if args.nodes is None else "node", *given)
