"""Options of `jaxtrain launch islands`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from jaxtrain.errors import UserError


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
        args.max_restarts, args.stop_timeout, continues=args.resume != "never", launch=_launch(args, here),
        processes=(args.processes or 1) * (args.nodes or 1),
    )  # fmt: skip


def _launch(args: argparse.Namespace, here: list[str] | None) -> tuple[str, ...]:
    """Returns the arguments of `jaxtrain launch` of an island with several processes or nodes; else none."""
    if args.nodes is not None and (here is None or len(here) > 1):
        expected = "expected --here with the island that has them, such as --here 2"
        raise UserError(f"launch: --nodes {args.nodes}: {expected}")
    if args.processes is None and args.nodes is None:
        return ()
    names = ["processes", "devices_per_process", "max_restarts", "collective_timeout"]
    names += [] if args.nodes is None else ["nodes", "node", "coordinator", "host"]
    given = {name: getattr(args, name) for name in names}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    return ("local" if args.nodes is None else "node", *options)
