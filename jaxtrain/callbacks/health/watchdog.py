"""Watchdog for hangs: ends the process if a step, its data or another phase makes no progress."""

from __future__ import annotations

from functools import partial

import jax

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.core.program import Program
from jaxtrain.hlo.collectives import count_collectives, totals_by_axes
from jaxtrain.io.ticker import PERIOD
from jaxtrain.io.watchdog import Watchdog
from jaxtrain.trackers.files import append_event

STEP = "jit_step"  # name of the train step's module, after the function in `core.step.drop_gradients`


def step_collectives(program: Program) -> list[str]:
    """Lists the collectives of the compiled train step by kind and mesh axes, read from the loaded executable.

    It compiles nothing and uses no device, so it works while all of them hang. If the process holds steps of other
    programs for as many devices, it lists all, because it cannot distinguish them.
    """
    mesh = program.sharder.mesh
    if mesh is None:
        return []
    count, client = len(mesh.local_devices), mesh.devices.flat[0].client
    loaded = [executable for executable in client.live_executables() if len(executable.local_devices()) == count]
    texts = [module.to_string() for executable in loaded for module in executable.hlo_modules() if module.name == STEP]
    steps = dict.fromkeys(_collectives(text, dict(mesh.shape)) for text in texts)
    title = "collectives of a step, one of which some devices may be waiting in:"
    return [line for lines in steps for line in (title, *lines)] or ["the train step is not compiled yet"]


def _collectives(text: str, sizes: dict[str, int]) -> tuple[str, ...]:
    rows = totals_by_axes(count_collectives(text, sizes))
    return tuple(f"  {op} over {axes}: {count:,}" for (axes, op), (count, _) in rows.items()) or ("  none",)


class HangWatchdog(Callback):
    """Runs a `Watchdog` beside the training thread, from the moment that the program is built.

    Args:
        limit: seconds that a step or its data may take; None: see `Watchdog.deadline`; 0: no limit.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit = limit

    def setup(self, trainer: TrainerView) -> None:
        """Starts the watchdog."""
        watchdog = Watchdog(
            trainer.ledger, trainer.dir, partial(append_event, trainer.dir), process=jax.process_index(),
            processes=jax.process_count(), limit=self._limit, period=PERIOD,
            describe_program=partial(step_collectives, trainer.program),
        )  # fmt: skip
        trainer.ticker.add(watchdog)
