"""Rounds of islands against those of one program, compiled as in use. Prints the largest differences as JSON."""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import tiny_net
from local_islands import LocalServer, Rows, train_islands

from jaxtrain.core.placement import Placer
from jaxtrain.core.program import build_program

STEPS = 12
ADAMW = {"name": "adamw", "lr": 0.02, "weight_decay": 0.1}
CASES = {
    f"{strategy} {count} {weights}": ({"strategy": strategy, "every": 3}, count, weights)
    for strategy, count, weights in [
        ("diloco", 2, "even"), ("diloco", 4, "uneven"), ("local_sgd", 4, "uneven"), ("bsp", 4, "even"),
    ]
}  # fmt: skip


def difference(sync: dict, count: int, weights: str) -> float:
    data = Rows(weights=weights)
    given = {"sync": sync, "steps": STEPS, "optimizer": ADAMW | {"grad_clip_norm": None}}
    program = build_program(
        tiny_net.config(mesh={"replica": count}, **given), None, jax.devices()[:count], data.batch(0)
    )
    place, state = Placer(data.batch, program.sharder, tiny_net.ROWS, False), program.init()
    for step in range(STEPS):
        state, _ = program.step_at(step)(state, place(step))
    agreed = jax.device_get(program.agreed(state)["params"])
    servers = 1 if sync["strategy"] == "bsp" else 2  # an optimizer is compiled for the tensors of its server
    config = tiny_net.config(islands={"count": count, "servers": servers}, **given)
    with LocalServer(config) as server:
        found = train_islands(config, [{}] * count, server, data)
    ours = jax.device_get([state["sync"]["agreed"] if "sync" in state else state["params"] for _, state in found])
    return max(float(np.abs(each[name] - agreed[name]).max()) for each in ours for name in agreed)


if __name__ == "__main__":
    print(json.dumps({name: difference(*case) for name, case in CASES.items()}))
