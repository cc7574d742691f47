"""The replicas that wrote a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.schema import SyncConfig
from jaxtrain.core.program import Program
from jaxtrain.sync.synchronizer import Synchronizer


def saved_synchronizer(manifest: Mapping[str, Any], program: Program) -> Synchronizer:
    """Returns the synchronizer whose state a checkpoint holds, from its manifest."""
    sync = SyncConfig(**manifest.get("config", {}).get("sync", {}))
    return program.make_synchronizer(sync, manifest.get("mesh", {}).get("replica", 1))
