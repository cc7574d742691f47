"""Config of the program of one island, from that of the run."""

from __future__ import annotations

from typing import Any

from jaxtrain.config.schema import OBJECT, Config
from jaxtrain.config.sections.islands import STALE, IslandsConfig
from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.errors import UserError


def island_config(config: Config) -> Config:
    """Returns the config of a run alone on an island's rows. It has no optimizer if the servers get gradients.

    Raises:
        UserError: the islands do not divide the batch.
    """
    rows, count = config.data.global_batch, config.islands.count
    if rows % count:
        raise UserError(f"data.global_batch: {rows} rows for {count} islands; expected a multiple of islands.count")
    data = config.data.model_copy(update={"global_batch": rows // count})
    changes: dict[str, Any] = {"data": data, "sync": SyncConfig()}
    if config.sync.strategy in STALE:
        changes["optimizer"] = config.optimizer.model_copy(update={"name": OBJECT})
    return config.model_copy(update=changes)


def program_config(config: Config) -> Config:
    """Returns the config of one program of a run: that of an island as if it were alone, or the config itself.

    Raises:
        UserError: the islands do not divide the batch.
    """
    if not config.islands.has_islands:
        return config
    return island_config(config).model_copy(update={"islands": IslandsConfig()})
