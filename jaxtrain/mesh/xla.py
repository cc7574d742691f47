"""What XLA has to be told before it starts."""

from __future__ import annotations

import os
from importlib import metadata

UNNAMED = "--xla_enable_hlo_sharding_v3=false"


def prepare() -> None:
    """To be called before JAX looks for devices; later is too late, and does nothing.

    XLA of JAX 0.11 writes shardings by the names of mesh axes, and lists the manual axes of an outer `shard_map` before
    those of an inner one. Where the mesh has them the other way round (stages inside of replicas) a check of its own,
    that they are sorted, ends the process. Shardings without names, those of JAX 0.10, have no such check; no option of
    a single program chooses them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if metadata.version("jaxlib").startswith("0.11.") and UNNAMED.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {UNNAMED}".strip()
