"""Numbers of the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as numbers; a vector, of replicas, gives `NAME/INDEX` for each entry that is not 0."""
    result = {}
    for name, value in metrics.items():
        if np.ndim(value) == 0:
            result[name] = float(value)
        else:
            result |= {f"{name}/{index}": float(entry) for index, entry in enumerate(value) if entry}
    return result
