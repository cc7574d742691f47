"""Watches for hangs: a step, its data or another phase that makes no progress ends the process."""

from __future__ import annotations

from functools import partial

import jax

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.core.program import Program
from jaxtrain.hlo.collectives import report, summary
from jaxtrain.io.ticker import PERIOD
from jaxtrain.io.watchdog import Watchdog
from jaxtrain.trackers.files import append_event

STEP = "jit_step"  # name of the train step's module


def in_flight(program: Program) -> list[str]:
    """Collectives of the compiled train step by kind and mesh axes, a line each, read from the loaded executable.

    Nothing is compiled and no device is asked, so this works while all of them hang. A process that has trained other
    programs on as many devices may hold their steps too and cannot tell them apart: then all are listed.
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


class HangWatchdog(Callback):
    """Runs a `Watchdog` beside the training thread, from the moment that the program is built.

    Args:
        limit: seconds that a step or its data may take; None: see `Watchdog.deadline`; 0: nothing is ever ended.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit = limit

    def setup(self, trainer: TrainerView) -> None:
        """Starts to watch."""
        watchdog = Watchdog(
            trainer.ledger, trainer.dir, partial(append_event, trainer.dir), process=jax.process_index(),
            processes=jax.process_count(), limit=self._limit, in_flight=partial(in_flight, trainer.program),
            period=PERIOD,
        )  # fmt: skip
        trainer.ticker.add(watchdog)
