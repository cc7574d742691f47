"""Section `islands` of the config: independent runs that agree through a parameter server, or among themselves."""

from __future__ import annotations

from typing import Literal

from jaxtrain.config.field_types import Count, NonNegative, PositiveFloat
from jaxtrain.config.section import Section, key

STALE = ("bsp", "ssp", "asp")  # strategies whose islands push gradients
AT_ROUNDS = ("local_sgd", "diloco", "muloco", "async_diloco")  # strategies whose islands train alone for some steps
WITHOUT_SERVER = ("local_sgd", "diloco", "muloco", "streaming_diloco", "gossip")  # those that may agree by themselves
NEVER_WITH_SERVER = ("streaming_diloco", "gossip")  # those of them that no server has
WITHOUT_MEAN = ("gossip",)  # those in which no island has what all agree on
AMONG_ISLANDS = ("async_diloco",)  # strategies that replicas of one program do not have


class IslandsConfig(Section):
    """Islands: runs of their own, started by `jaxtrain launch islands`, that agree by `sync.strategy`."""

    count: Count = key(0, "islands, each with its rows of the global batch; 0: one run alone")
    servers: Count = key(
        1, "processes that hold the parameters, each an equal share of their bytes; 0: none, islands of local_sgd, "
        "diloco, muloco, streaming_diloco and gossip average among themselves"
    )  # fmt: skip
    quorum: Count = key(0, "islands that complete a round; 0: all that are there, for async_diloco one")
    grace: NonNegative = key(0.0, "seconds that a round waits for the others when it has its quorum")
    heartbeat: PositiveFloat = key(5.0, "seconds between signs of life; an island without any for twice that has left")
    late: Literal["drop", "scale"] = key(
        "drop", "work of an island that had left: `drop` it, or `scale` it by 1 / (1 + updates since its read)"
    )

    @property
    def has_islands(self) -> bool:
        """True if the run is one of several islands."""
        return self.count > 0
