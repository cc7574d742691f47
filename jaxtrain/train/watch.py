"""What looks on while a run trains: the watchdog, the records of the ledger, the pace of the processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax

from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.pace import Coordinator, Pace
from jaxtrain.observe.ticker import PERIOD
from jaxtrain.observe.tracker import append_event
from jaxtrain.plan.communication import report, summary
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.train.program import Program

STEP = "jit_step"  # name of the train step's module


def watchdog(program: Program, directory: Path, ledger: Ledger, deadline: float | None) -> Watchdog:
    """What ends this process should it hang; `deadline` as `limit` of `Watchdog`."""
    return Watchdog(
        ledger, directory, partial(append_event, directory), process=jax.process_index(),
        processes=jax.process_count(), limit=deadline, in_flight=partial(in_flight, program),
        period=PERIOD,
    )  # fmt: skip


def pace(ledger: Ledger) -> Pace | None:
    """What compares the processes; None where there is only one."""
    return None if jax.process_count() == 1 else Pace(ledger, jax.process_index(), Coordinator())


def in_flight(program: Program) -> list[str]:
    """The collectives of the compiled train step by kind and mesh axes, a line each; read from the running program.

    Nothing is compiled and no device is asked: this works while all of them hang. A process that has trained other
    programs on as many devices may hold their steps too, and cannot tell which is which: then all are told.
    """
    mesh = program.sharder.mesh
    if mesh is None:
        return []
    many = len(mesh.local_devices)
    held = [one for one in mesh.devices.flat[0].client.live_executables() if len(one.local_devices()) == many]
    texts = [module.to_string() for one in held for module in one.hlo_modules() if module.name == STEP]
    steps = dict.fromkeys(_collectives(text, dict(mesh.shape)) for text in texts)
    title = "collectives of a step, one of which some devices may be waiting in:"
    return [line for lines in steps for line in (title, *lines)] or ["the train step is not compiled yet"]


def _collectives(text: str, sizes: dict[str, int]) -> tuple[str, ...]:
    rows = summary(report(text, sizes))
    return tuple(f"  {op} over {axes}: {count:,}" for (axes, op), (count, _) in rows.items()) or ("  none",)
