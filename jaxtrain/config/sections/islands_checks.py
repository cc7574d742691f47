"""Checks of a run of islands, beside those of single values."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.islands import (
    AMONG_ISLANDS,
    AT_ROUNDS,
    NEVER_WITH_SERVER,
    STALE,
    WITHOUT_MEAN,
    WITHOUT_SERVER,
    IslandsConfig,
)
from jaxtrain.config.sections.sync import CompressConfig
from jaxtrain.config.sections.sync_checks import KeysAndMessage
from jaxtrain.errors import join_words

FORMATS = ("none", "int8", "fp8", "int4", "int2")  # of values between islands, or with their servers


def island_problems(config: Config) -> Iterator[KeysAndMessage]:
    """Checks that the islands can agree by the strategy, and divide the batch."""
    islands, sync, rows = config.islands, config.sync, config.data.global_batch
    count = islands.count
    if not islands.has_islands:
        if sync.strategy in AMONG_ISLANDS:
            message = f"{sync.strategy} is for islands (`jaxtrain launch islands`); expected diloco"
            yield ("sync.strategy", "islands.count"), message
        if sync.is_stale and sync.compress.model_dump() != CompressConfig().model_dump():  # of the keys that are read
            message = f"{sync.strategy} of replicas of one program sends float32; expected no compression, or islands"
            yield ("sync.compress", "sync.strategy", "islands.count"), message
        return
    known = [*STALE, *AT_ROUNDS, *NEVER_WITH_SERVER]
    if sync.strategy in WITHOUT_MEAN:
        yield from _gossip_problems(config)
    if sync.strategy not in known:
        message = f"{sync.strategy} is for replicas of one program; islands agree by"
        yield ("sync.strategy", "islands.count"), f"{message} {join_words(known)}"
    elif islands.servers and sync.strategy in NEVER_WITH_SERVER:
        message = f"{sync.strategy} is for islands without a server; expected 0"
        yield ("islands.servers", "sync.strategy"), message
    elif not islands.servers and sync.strategy not in WITHOUT_SERVER:
        message = f"{sync.strategy} needs a server; expected at least 1, or {join_words(WITHOUT_SERVER)}"
        yield ("islands.servers", "sync.strategy"), message
    if not islands.servers and islands.late != "drop":
        yield ("islands.late", "islands.servers"), "without a server late work is dropped; expected drop"
    yield from _format_problems(config)
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


def _gossip_problems(config: Config) -> Iterator[KeysAndMessage]:
    """Yields what islands that gossip do not have."""
    islands, gossip, default = config.islands, config.sync.gossip, IslandsConfig()
    if gossip.graph == "directed":
        message = "islands have no weights of push-sum; expected ring, exponential or matching"
        yield ("sync.gossip.graph", "islands.count"), message
    if gossip.drop > 0:
        yield ("sync.gossip.drop", "islands.count"), "islands have no weights of push-sum; expected 0"
    for name in ("quorum", "grace"):
        if getattr(islands, name) != getattr(default, name):
            message = f"islands that gossip wait for their neighbours alone; expected {getattr(default, name):g}"
            yield (f"islands.{name}", "sync.strategy"), message


def _format_problems(config: Config) -> Iterator[KeysAndMessage]:
    """Yields compression that islands do not have."""
    sync = config.sync
    if sync.island_format not in FORMATS:
        message = f"islands send blocks of values, not {sync.island_format}; expected {join_words(FORMATS)}"
        yield ("sync.compress.gradients", "islands.count"), message
    if "compress" in sync.unread():
        return
    for name, default in (("weights", "none"), ("secondary", 0)):
        if getattr(sync.compress, name) != default:
            message = f"islands gather weights as they are stored; expected {default}"
            yield (f"sync.compress.{name}", "islands.count"), message
