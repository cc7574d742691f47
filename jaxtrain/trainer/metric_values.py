"""Numbers of the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as numbers; a vector, of replicas, gives `NAME/INDEX` for each entry that is not 0.

    Waits for them. All devices have a scalar, so one of them is read: `jax.device_get` takes three times as long.
    """
    result = {}
    for name, value in metrics.items():
        if np.ndim(value) == 0:
            result[name] = float(np.asarray(value.addressable_data(0)) if isinstance(value, jax.Array) else value)
        else:
            result |= {f"{name}/{index}": float(entry) for index, entry in enumerate(jax.device_get(value)) if entry}
    return result
