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


STALE: dict[str, dict] = {  # four workers, each with one row; of the last ones some pushes come at the same time
    "ssp": {"strategy": "ssp", "stale": {"bound": 1, "speeds": [1.0, 1.2, 0.9, 1.5], "jitter": 1.0, "seed": 2}},
    "asp": {"strategy": "asp", "stale": {"speeds": [1.0, 1.2, 0.2, 3.0], "jitter": 0.5, "seed": 1}},
    "asp_ties": {"strategy": "asp", "stale": {"speeds": [1.0, 2.0, 0.5, 4.0], "jitter": 0.0}},
}
STALE_STEPS, STALE_MOMENTUM = 16, 0.5


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


def stale_history(sync: dict) -> dict[str, list]:
    """Weights of the server after each of its updates, and how old the gradients of each were.

    An update is of all pushes before the next read. The optimizer is SGD with momentum, and its update is scaled by the
    share of the workers that pushed.
    """
    options = sync["stale"]
    count = len(options["speeds"])
    bound = options["bound"] if sync["strategy"] == "ssp" else count * STALE_STEPS
    draws = [np.random.default_rng((options.get("seed", 0), number, 0)).random(256) for number in range(count)]
    durations = [(1 + options["jitter"] * u) / speed for u, speed in zip(draws, options["speeds"])]
    workers = [{"w": np.zeros(FEATURES), "done": 0, "end": d[0], "read": 0, "waits": False} for d in durations]
    server, velocity, pushed = np.zeros(FEATURES), np.zeros(FEATURES), []
    found: dict[str, list] = {"agreed": [], "staleness": []}
    while len(found["agreed"]) < STALE_STEPS:
        now = min(worker["end"] for worker in workers if not worker["waits"])
        for number, worker in enumerate(workers):
            if worker["end"] == now and not worker["waits"]:
                x, y = rows(worker["done"])
                mine = slice(number, number + 1)
                pushed.append((gradient(worker["w"], x[mine], y[mine]), len(found["agreed"]) - worker["read"]))
                worker |= {"done": worker["done"] + 1, "waits": True}
        slowest = min(worker["done"] for worker in workers)
        readers = [number for number, w in enumerate(workers) if w["waits"] and w["done"] <= slowest + bound]
        if not readers:
            continue
        velocity = STALE_MOMENTUM * velocity + np.mean([g for g, _ in pushed], 0)
        server = server - len(pushed) / len(workers) * INNER_LR * velocity
        found["agreed"].append(server.tolist())
        found["staleness"].append([age for _, age in pushed])
        pushed = []
        for number in readers:
            end = now + durations[number][workers[number]["done"]]
            workers[number] |= {"w": server, "end": end, "read": len(found["agreed"]), "waits": False}
    return found


if __name__ == "__main__":
    golden = {name: history(sync) for name, sync in STRATEGIES.items()}
    golden |= {name: stale_history(sync) for name, sync in STALE.items()}
    GOLDEN.write_text(json.dumps(golden) + "\n", encoding="utf-8")
