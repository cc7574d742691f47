"""Rematerialisation by one value: a policy, or the names of the values that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def remat(policy: str | Sequence[str]) -> dict[str, Any]:
    """Keys of `step`."""
    if isinstance(policy, str):
        return {"remat": policy}
    return {"remat": "full", "remat_save": dict.fromkeys(policy, "device")}
