"""Checks of a run of islands, beside those of single values."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.islands import AMONG_ISLANDS, AT_ROUNDS, STALE
from jaxtrain.config.sections.sync_checks import KeysAndMessage
from jaxtrain.errors import join_words


def island_problems(config: Config) -> Iterator[KeysAndMessage]:
    """Checks that the islands can agree by the strategy, and divide the batch."""
    islands, sync, rows = config.islands, config.sync, config.data.global_batch
    count = islands.count
    if not islands.has_islands:
        if sync.strategy in AMONG_ISLANDS:
            message = f"{sync.strategy} is for islands (`jaxtrain launch islands`); expected diloco"
            yield ("sync.strategy", "islands.count"), message
        return
    if sync.strategy not in (*STALE, *AT_ROUNDS):
        message = f"{sync.strategy} is for replicas of one program; islands agree by"
        yield ("sync.strategy", "islands.count"), f"{message} {join_words([*STALE, *AT_ROUNDS])}"
    elif sync.is_rounded:
        message = "islands send float32; expected no compression (none)"
        yield ("sync.compress", "islands.count"), message
    if config.mesh.replica != 1:
        yield ("mesh.replica", "islands.count"), "each island is one replica; expected 1"
    if rows % count:
        near = rows // count * count or count
        yield (
            ("data.global_batch", "islands.count"),
            f"{rows} rows cannot be divided over {count} islands; expected a multiple such as {near}",
        )
    if islands.quorum > count:
        yield ("islands.quorum", "islands.count"), f"there are {count} islands; expected at most {count}"
