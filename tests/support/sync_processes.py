"""Trains with every strategy in turn, as one of some processes. Argument: FOLDER, which gets losses-INDEX.json."""

import json
import sys
from pathlib import Path

import jax
import tiny_net

from jaxtrain.core.placement import placer
from jaxtrain.distributed import runtime
from jaxtrain.sync import quantized_mean
from jaxtrain.sync.compression import top_k

FOLDER = Path(sys.argv[1])
STRATEGIES = {
    "bsp": {},
    "local_sgd": {"strategy": "local_sgd", "every": 3},
    "diloco": {"strategy": "diloco", "every": 3, "compress": {"deltas": "int4"}},
    "streaming": {
        "strategy": "streaming_diloco", "every": 4, "streaming": {"fragments": 2, "tau": 1},
        "compress": {"deltas": "int8"},
    },
    "gossip": {
        "strategy": "gossip", "every": 1, "gossip": {"graph": "directed", "edges": ((0, 1), (1, 0)), "drop": 0.3},
    },
    "ssp": {"strategy": "ssp", "stale": {"bound": 1, "speeds": (1.0, 0.4)}},
    "asp": {"strategy": "asp", "stale": {"speeds": (1.0, 0.4)}},
    "int8": {"compress": {"gradients": "int8"}},
    "powersgd": {"compress": {"gradients": "powersgd", "rank": 1}},
    "topk": {"compress": {"gradients": "topk", "share": 0.3}},
}  # fmt: skip


def losses(sync: dict) -> list[float]:
    """The losses of ten steps."""
    program = tiny_net.program({"replica": 2, "fsdp": 2}, sync=sync)
    data, state, found = tiny_net.Rows("train", 0, tiny_net.ROWS), program.init(), []
    place = placer(data, program)
    for step in range(10):
        state, metrics = program.step_at(step)(state, place(step))
        found.append(float(metrics["loss"]))
    return found


quantized_mean.SMALLEST = top_k.SMALLEST = 1  # all of this small network travels compressed
runtime.start(4)
found = {name: losses(sync) for name, sync in STRATEGIES.items()}
(FOLDER / f"losses-{jax.process_index()}.json").write_text(json.dumps(found))
