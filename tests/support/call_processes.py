"""One of two processes whose callback communicates. Arguments: FOLDER asked|alone|hangs."""

import json
import sys
import time
from pathlib import Path

import data_runs
import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxtrain

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]


class Norm(jaxtrain.Callback):
    """Process 1 asks for a sum over the processes, communicates unasked, or hangs."""

    def __init__(self) -> None:
        self.found: list[list] = []

    def on_step_end(self, trainer, step):
        time.sleep(0.05)
        if jax.process_index() == 1 and step == 3:
            if MODE == "asked":
                trainer.request_call("sum")
            elif MODE == "alone":
                multihost_utils.sync_global_devices("alone")  # the other never comes
            else:
                time.sleep(3600)

    def on_call(self, trainer, step, name):
        parts = multihost_utils.process_allgather(np.float32(jax.process_index() + 1))
        self.found.append([name, step, float(np.sum(parts))])


norm, deadline = Norm(), None if MODE == "asked" else 5.0
run = data_runs.trainer(FOLDER, "run", lambda: data_runs.batches(300), steps=100, callbacks=[norm], deadline=deadline)
run.fit()
(FOLDER / f"found-{jax.process_index()}.json").write_text(json.dumps(norm.found))
