"""Processor time that callbacks add to a step.

    python benchmarks/callbacks.py [--steps 300] [--rounds 7] [--out callbacks.json]

Trains a tiny model twice, in turns of one run each: without callbacks, and with three: early stopping, the rate
monitor, and one of a user's that reads the metrics of the step before. Counts the processor time of all threads
(`time.process_time`) from step 20 to the last one, which a busy machine disturbs less than the clock's. Every process
time includes the step itself, which is the same in both. The goal is 0.3 ms a step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

FIRST = 20  # steps that are not counted: compilation, and caches that fill


def run(folder: Path, name: str, steps: int, callbacks: list[Any]) -> float:
    """Milliseconds of processor time per step."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from rich.console import Console

    import jaxtrain
    from jaxtrain.trackers.console import ConsoleTracker

    class Linear(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.weight = nnx.Param(nnx.initializers.normal()(rngs.params(), (8, 2)))

        def __call__(self, x: Any) -> Any:
            return x @ self.weight

    def batches() -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng(0)
        while True:
            x = rng.standard_normal((16, 8)).astype(np.float32)
            yield {"x": x, "y": x @ np.ones((8, 2), np.float32)}

    with open("/dev/null", "w") as nowhere:
        trainer = jaxtrain.Trainer(
            {"data": {"global_batch": 16}}, name=name, dir=str(folder), steps=steps, precision="fp32", model=Linear,
            loss=lambda model, batch: jnp.square(model(batch["x"]) - batch["y"]).mean(), data=batches,
            optimizer=optax.inject_hyperparams(optax.sgd)(0.01), callbacks=callbacks, log={"tensorboard": False},
            console=ConsoleTracker(steps, console=Console(file=nowhere), live=False),
        )  # fmt: skip
        for step in trainer.steps():
            if step.number == FIRST:
                begun = time.process_time()
            if step.number == steps - 1:
                taken = time.process_time() - begun
    return 1e3 * taken / (steps - 1 - FIRST)


def three() -> list[Any]:
    """Three callbacks."""
    import jaxtrain

    class Reads(jaxtrain.Callback):
        """Follows the loss."""

        lowest = float("inf")

        def on_step_end(self, trainer: Any, step: int) -> None:
            self.lowest = min(self.lowest, trainer.latest_metrics.get("loss", self.lowest))

    return [jaxtrain.EarlyStopping(), jaxtrain.LearningRateMonitor(), Reads()]


def main() -> None:
    """Prints the table and, with --out, writes the JSON."""
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each, in turns")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.rounds = 30, 2
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.rounds + 1):
            without = run(Path(name), f"without-{number}", args.steps, [])
            pairs.append((without, run(Path(name), f"with-{number}", args.steps, three())))
            print(pairs[-1], file=sys.stderr)
    pairs = pairs[1:]  # the first pair compiles
    added = [after - before for before, after in pairs]
    result = {
        "without_ms": common.spread([before for before, _ in pairs]),
        "with_ms": common.spread([after for _, after in pairs]),
        "added_ms": common.spread(added), "added_ms_95": common.median_interval(added),
    }  # fmt: skip
    where = common.machine()
    print(common.title(where))
    print(common.table([{name: values.get("median", values.get("high")) for name, values in result.items()}]))
    common.report("callbacks", args, [result], where)


if __name__ == "__main__":
    main()
