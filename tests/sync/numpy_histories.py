"""The strategies on a linear model, worked out in NumPy; `python numpy_histories.py` writes the golden file.

The model is y ~ x w of one weight vector, the loss the mean of the squares, and the inner optimizer plain SGD.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).with_name("histories.json")
STEPS, EVERY, INNER_LR, REPLICAS, FEATURES, ROWS = 6, 2, 0.125, 2, 3, 4
OUTER = {"lr": 0.5, "momentum": 0.5}
STRATEGIES: dict[str, dict] = {
    "local_sgd": {"strategy": "local_sgd", "every": EVERY},
    "post_local": {"strategy": "post_local", "every": EVERY, "bsp_steps": 2},
    "diloco": {"strategy": "diloco", "every": EVERY, "outer": {**OUTER, "nesterov": True}},
    "diloco_heavy_ball": {"strategy": "diloco", "every": EVERY, "outer": {**OUTER, "nesterov": False}},
    "diloco_sgd": {"strategy": "diloco", "every": EVERY, "outer": {"lr": 0.5, "momentum": 0.0}},
}


def rows(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Small integers, so that the first gradients are exact."""
    rng = np.random.default_rng(step)
    return rng.integers(-2, 3, size=(ROWS, FEATURES)).astype(float), rng.integers(-3, 4, size=ROWS).astype(float)


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 2 * x.T @ (x @ w - y) / len(y)


def history(sync: dict) -> dict[str, list]:
    """Weights of the replicas after every step, exchanges included, and those that the replicas agree on."""
    local, outer, velocity = np.zeros((REPLICAS, FEATURES)), np.zeros(FEATURES), np.zeros(FEATURES)
    found: dict[str, list] = {"local": [], "agreed": []}
    first = sync.get("bsp_steps", 0)
    for step in range(STEPS):
        x, y = rows(step)
        if step < first:
            local = local - INNER_LR * gradient(local[0], x, y)
        else:
            parts = zip(local, np.split(x, REPLICAS), np.split(y, REPLICAS))
            local = np.stack([w - INNER_LR * gradient(w, *part) for w, *part in parts])
        if step >= first and (step - first + 1) % EVERY == 0:
            mean = local.mean(0)
            if sync["strategy"] == "diloco":
                options = sync["outer"]
                delta = outer - mean
                velocity = options["momentum"] * velocity + delta
                is_ahead = options.get("nesterov", False)
                outer = outer - options["lr"] * (delta + options["momentum"] * velocity if is_ahead else velocity)
                mean = outer
            local = np.tile(mean, (REPLICAS, 1))
        found["local"].append(local.tolist())
        found["agreed"].append((outer if sync["strategy"] == "diloco" else local.mean(0)).tolist())
    return found


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: history(sync) for name, sync in STRATEGIES.items()}) + "\n", encoding="utf-8")
