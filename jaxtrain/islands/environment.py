"""Environment of an island's process: who it is, and where the others are."""

from __future__ import annotations

ISLAND, ADDRESS, RUN = "JAXTRAIN_ISLAND", "JAXTRAIN_ISLANDS_ADDRESS", "JAXTRAIN_ISLANDS_RUN"


def environment(island: int, address: str, run: str) -> dict[str, str]:
    """Returns the environment of an island.

    Args:
        island: its index.
        address: of the Ray cluster.
        run: name of the run there.
    """
    return {ISLAND: str(island), ADDRESS: address, RUN: run}
