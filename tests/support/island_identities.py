"""Rounds of islands against those of one program, compiled as in use. Prints the largest differences as JSON."""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import tiny_net
from local_islands import LocalServer, Rows, train_islands
from local_islands import agreed as on_host

from jaxtrain.core.placement import Placer
from jaxtrain.core.program import build_program

STEPS = 12
ADAMW = {"name": "adamw", "lr": 0.02, "weight_decay": 0.1}
SYNC = {
    "local_sgd": {"every": 3}, "diloco": {"every": 3},
    "streaming_diloco": {"every": 6, "streaming": {"fragments": 2, "tau": 2}},
}  # fmt: skip
CASES = {
    " ".join(map(str, (strategy, *case))): (SYNC.get(strategy, {}) | {"strategy": strategy}, *case)
    for strategy, *case in [
        ("diloco", 2, "even", 2), ("diloco", 4, "uneven", 2), ("local_sgd", 4, "uneven", 2),
        ("bsp", 4, "even", 1),  # an optimizer is compiled for the tensors of its server
        ("diloco", 2, "even", 0), ("diloco", 4, "uneven", 0), ("local_sgd", 4, "uneven", 0),
        ("streaming_diloco", 2, "even", 0), ("streaming_diloco", 4, "uneven", 0),
    ]
} | {
    f"gossip {graph} {count}": ({"strategy": "gossip", "every": 2, "gossip": {"graph": graph}}, count, "uneven", 0)
    for graph in ("ring", "exponential", "matching") for count in (2, 4)
}  # fmt: skip


def difference(sync: dict, count: int, weights: str, servers: int) -> float:
    data = Rows(weights=weights)
    given = {
        "model": {"type": "tiny_net:Left"},
        "sync": sync,
        "steps": STEPS,
        "optimizer": ADAMW | {"grad_clip_norm": None},
    }
    program = build_program(
        tiny_net.config(mesh={"replica": count}, **given), None, jax.devices()[:count], data.batch(0)
    )
    place, state = Placer(data.batch, program.sharder, tiny_net.ROWS, False), program.init()
    for step in range(STEPS):
        state, _ = program.step_at(step)(state, place(step))
    expected = [jax.device_get(program.agreed(state)["params"])] * count
    if sync["strategy"] == "gossip":  # each has its own
        expected = [{name: value[i] for name, value in jax.device_get(state["params"]).items()} for i in range(count)]
    config = tiny_net.config(islands={"count": count, "servers": servers}, **given)
    with LocalServer(config) as server:
        found = train_islands(config, [{}] * count, server, data)
    ours = [on_host(state) for _, state in found]
    pairs = [(found[name], right[name]) for found, right in zip(ours, expected) for name in right]
    return max(float(np.abs(found - right).max()) for found, right in pairs)


if __name__ == "__main__":
    print(json.dumps({name: difference(*case) for name, case in CASES.items()}))
