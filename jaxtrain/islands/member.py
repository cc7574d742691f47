"""The place of this process among the islands, from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.config import Config
from jaxtrain.errors import UserError
from jaxtrain.io.packages import import_optional
from jaxtrain.islands.client import Door
from jaxtrain.islands.environment import ADDRESS, ISLAND, RUN


def this_island(config: Config, environ: Mapping[str, str] = os.environ) -> Callback:
    """Returns the callback of the island that this process is.

    Raises:
        UserError: nobody has started it as an island.
    """
    missing = [name for name in (ISLAND, ADDRESS, RUN) if not environ.get(name)]
    if missing:
        message = f"islands.count: {config.islands.count} islands, and {missing[0]} is not set"
        raise UserError(f"{message}; expected `jaxtrain launch islands`, or islands.count=0 for one run alone")
    index = environ[ISLAND]
    if not index.isdecimal():
        raise UserError(f"{ISLAND}: found {index!r}; expected the index of the island")
    from jaxtrain.islands.callback import IslandCallback

    def connect(trainer: TrainerView) -> Door:
        import_optional("ray", "an island", "islands")
        from jaxtrain.islands.processes.ray_mail import process_door
        from jaxtrain.islands.ray_engine import RayDoor

        return process_door(RayDoor(environ[ADDRESS], environ[RUN]), int(index), environ[RUN])

    return IslandCallback(int(index), connect)
