"""A script as users write it: a module, a loss and data that only it has. Arguments: RUNS STEPS [what goes wrong]."""

import os
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxtrain

RUNS, STEPS, MODE = Path(sys.argv[1]), int(sys.argv[2]), (*sys.argv[3:], "")[0]
ROWS = 24


class Line(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(nnx.initializers.normal()(rngs.params(), (24, 2)))

    def __call__(self, x):
        return x @ self.weight


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


class Points:
    def batch(self, step, rows=slice(None)):
        if MODE == "raises" and step == 5 and os.environ.get("JAX_PROCESS_ID") == "1":
            raise ValueError("no such point")
        time.sleep(0.05 if MODE else 0.0)
        x = np.random.default_rng(step).standard_normal((ROWS, 24)).astype(np.float32)
        return {"x": x[rows], "y": (x @ np.ones((24, 2), np.float32))[rows]}


if MODE == "no run":
    sys.exit("I do not train")
jaxtrain.initialize(simulate=4)
print("devices are there")
trainer = jaxtrain.Trainer(
    {"data": {"global_batch": ROWS}}, dir=str(RUNS), name="script", steps=STEPS, simulate=4, layout="fsdp",
    precision="fp32", checkpoint={"every": 3}, log={"tensorboard": False}, model=Line, loss=squares, data=Points(),
    eval_data=Points(), optimizer=optax.adam(1e-2),
)  # fmt: skip
result = trainer.fit()
(RUNS / f"after-{os.environ.get('JAX_PROCESS_ID', 0)}").write_text(f"{result.step} {trainer.evaluate()['eval/loss']}")
if MODE == "second":
    jaxtrain.train(
        {"data": {"global_batch": ROWS}}, dir=str(RUNS), name="other", model=Line, loss=squares, data=Points()
    )
