"""Overhead of the train loop over a bare JAX loop of the same model, per step.

    python benchmarks/overhead.py [--devices 1 8] [--layouts ddp fsdp] [--sizes tiny small medium] [--block 8]
                                  [--blocks 12] [--precision fp32] [--out overhead.json]

One process trains both, in turns of `--block` steps, from the same weights on the same batches: jaxtrain's whole loop
(`trainer.loop.iterate`: token cache, prefetcher, step, metrics, JSON and TensorBoard files, console; no validation, no
checkpoint before the end) and benchmarks/bare.py in a minimal loop. A console that is called after every step switches
between them; each turn ends when its last step has finished on the device. Losses must agree at every step, or the
comparison fails.

`wall` is the median over turns of jaxtrain's time per step over that of the bare turn next to it, with quartiles and
the 95% interval of the median;
`cpu` is the same for processor time, which a busy machine disturbs less (on CPU devices it includes the step).
The goal is 1.02, with an interval that ends below 1.05. Each number of devices runs in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 192, "vocab": 512, "rows": 8, "length": 64},
    "small": {
        "embed": 128, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 384, "vocab": 512, "rows": 8, "length": 128,
    },
    "medium": {
        "embed": 256, "layers": 6, "heads": 8, "kv_heads": 4, "mlp": 704, "vocab": 4096, "rows": 8, "length": 128,
    },
    "large": {
        "embed": 512, "layers": 8, "heads": 8, "kv_heads": 8, "mlp": 1408, "vocab": 8192, "rows": 8, "length": 128,
    },
    "gpu-small": {
        "embed": 768, "layers": 12, "heads": 12, "kv_heads": 12, "mlp": 2048, "vocab": 32000, "rows": 8, "length": 1024,
    },
    "gpu-medium": {
        "embed": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "mlp": 2816, "vocab": 32000, "rows": 4,
        "length": 4096,
    },
}  # fmt: skip
LR = {"fp32": 1e-4, "bf16": 1e-5}  # so low that roundings do not part the two
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # relative; rounding grows over the steps


def corpus(folder: Path) -> Path:
    """A few hundred text files of random words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    (folder / "text").mkdir()
    for index in range(400):
        (folder / "text" / f"{index}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(50, 1500))))
    return folder / "text"


def make_config(spec: dict[str, Any], folder: Path, steps: int) -> Any:
    """Config of one point."""
    import jaxtrain

    size = dict(spec["shape"])
    rows, length = size.pop("rows"), size.pop("length")
    base = {
        "name": "overhead", "dir": str(folder / "runs"), "steps": steps, "precision": spec["precision"],
        "layout": spec["layout"], "model": size,
        "data": {"sources": [{"path": str(corpus(folder))}], "sequence": length, "global_batch": rows,
                 "validation_fraction": 0.0, "cache_dir": str(folder / "cache"), "workers": 1},
        "optimizer": {"lr": LR[spec["precision"]]}, "schedule": {"name": "constant"}, "step": {"remat": spec["remat"]},
    }  # fmt: skip
    return jaxtrain.load(None, base=base)


class Bare:
    """The hand-written loop: a batch put on the device ahead, the loss of the step before read while this one runs."""

    def __init__(self, config: Any, program: Any, params: Any, data: Any):
        import bare
        import jax

        from jaxtrain.precision.policy import POLICIES

        opt = config.optimizer
        tx = bare.Optimizer(opt.lr, *opt.betas, opt.epsilon, opt.weight_decay, opt.grad_clip_norm).make()
        dtype = POLICIES[config.precision].compute
        shape = bare.Shape(config.model.rope_theta, config.model.norm_epsilon, config.loss.vocab_chunks,
                           config.step.remat == "full", dtype)  # fmt: skip
        self.step = bare.make_step(shape, tx, program.sharder, gathered=config.layout == "fsdp")
        params = bare.from_framework(params)
        self.state = {"params": params, "opt_state": tx.init(params)}
        self.sharding = jax.sharding.NamedSharding(
            program.sharder.mesh, jax.sharding.PartitionSpec(program.sharder.axes("batch") or None)
        )
        self.data, self.done, self.losses = data, 0, []

    def turn(self, steps: int) -> tuple[float, float]:
        """Wall and processor seconds of some steps, with host batches prepared before."""
        import jax

        hosts = [self.data.batch(self.done + i) for i in range(steps)]
        before, waiting = None, []
        begin, cpu = time.perf_counter(), time.process_time()
        ready = jax.device_put(hosts[0], self.sharding)
        for index in range(steps):
            self.state, metrics = self.step(self.state, ready)
            if index + 1 < steps:
                ready = jax.device_put(hosts[index + 1], self.sharding)
            if before is not None:
                waiting.append(float(before["loss"]))
            before = metrics
        jax.block_until_ready(before)
        took = time.perf_counter() - begin, time.process_time() - cpu
        self.losses += [*waiting, float(before["loss"])]
        self.done += steps
        return took


def turns_screen(steps: int, block: int) -> Any:
    """Console that runs the bare loop after every `block` steps."""
    import io

    import jax
    from rich.console import Console

    from jaxtrain.trackers.console import ConsoleTracker

    class Turns(ConsoleTracker):
        """Measures from the end of the bare turn to the end of the last step in flight."""

        bare: Bare
        newest: Any = None

        def begin(self) -> None:
            self.times, self.losses = [], []
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def step(self, program_step: Any) -> Any:
            def step(state, batch):
                out = program_step(state, batch)
                self.newest = out[1]
                return out

            return step

        def log(self, step: int, values: Any) -> None:
            super().log(step, values)
            self.losses.append(values["loss"])
            if step % block:
                return
            jax.block_until_ready(self.newest)  # of step + 1, which the loop has started already
            mine = time.perf_counter() - self.wall, time.process_time() - self.cpu
            time.sleep(0.02)  # the prefetcher fills up: nothing of it falls into the bare turn
            bare = self.bare.turn(block + (not self.times))  # the first turn has that one step more
            self.times.append((mine, bare))
            self.wall, self.cpu = time.perf_counter(), time.process_time()

    return Turns(steps, console=Console(file=io.StringIO(), width=100), live=False)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """One point, in this process."""
    from jaxtrain.callbacks.default import default_callbacks
    from jaxtrain.trainer import loop
    from jaxtrain.trainer.setup import open_trainer
    from jaxtrain.trainer.signals import Signals

    block, blocks = spec["block"], spec["blocks"]
    steps = block * (blocks + 1) + 2  # the first turn holds compilation
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make_config(spec, folder, steps)
        screen = turns_screen(steps, block)
        directory, callbacks = folder / "runs" / "overhead", default_callbacks(config)
        trainer, state, _ = open_trainer(config, directory, console=screen, resume=False, callbacks=callbacks)
        trainer.program = replace(trainer.program, step=screen.step(trainer.program.step))
        screen.bare = Bare(config, trainer.program, state["params"], trainer.data)
        screen.begin()
        with Signals() as signals:
            for _ in loop.iterate(trainer, loop.Progress(state, 0), signals):
                pass
        trainer.stop(steps, "finished")
        trainer.close()
        count = trainer.program.model_def.params
    return summary(spec, screen, count)


def summary(spec: dict[str, Any], screen: Any, params: Any) -> dict[str, Any]:
    """Medians and ratios; raises if the losses differ."""
    import jax
    import numpy as np

    both = min(len(screen.losses), len(screen.bare.losses))
    ours, theirs = np.array(screen.losses[:both]), np.array(screen.bare.losses[:both])
    off = np.abs(ours / theirs - 1)
    if not (off.max() < LOSS_TOLERANCE[spec["precision"]] and off[0] < LOSS_TOLERANCE[spec["precision"]] / 100):
        raise SystemExit(f"not the same model: losses differ by up to {off.max():.2g}, the first by {off[0]:.2g}")
    block = spec["block"]
    pairs = [[(a / block, b / block) for a, b in zip(mine, bare)] for mine, bare in screen.times[1:]]
    wall, cpu = ([pair[i] for pair in pairs] for i in (0, 1))
    return {
        "machine": common.machine(),
        "parameters": sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params)),
        "turns": len(pairs),
        "jaxtrain_seconds": common.spread([a for a, _ in wall]),
        "bare_seconds": common.spread([b for _, b in wall]),
        "wall_ratio": common.spread([a / b for a, b in wall]),
        "wall_ratio_95": common.median_interval([a / b for a, b in wall]),
        "cpu_ratio": common.spread([a / b for a, b in cpu]),
        "cpu_seconds": {"jaxtrain": common.spread([a for a, _ in cpu]), "bare": common.spread([b for _, b in cpu])},
        "steps_compared": both,
        "loss_difference": {"first": float(off[0]), "largest": float(off.max())},
        "losses": {"first": float(ours[0]), "last": float(ours[-1])},
    }


def shown(spec: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    row = {"size": spec["size"], "layout": spec["layout"], "devices": spec["devices"]}
    if "error" in result:
        return row | {"error": result["error"]}
    wall, cpu, interval = result["wall_ratio"], result["cpu_ratio"], result["wall_ratio_95"]
    return row | {
        "parameters": result["parameters"],
        "jaxtrain ms": result["jaxtrain_seconds"]["median"] * 1e3,
        "bare ms": result["bare_seconds"]["median"] * 1e3,
        "wall": f"{wall['median']:.3f} [{wall['q1']:.3f} {wall['q3']:.3f}]",
        "95%": f"{interval['low']:.3f} {interval['high']:.3f}",
        "cpu": f"{cpu['median']:.3f} [{cpu['q1']:.3f} {cpu['q3']:.3f}]",
        "loss differs by": f"{result['loss_difference']['largest']:.1e}",
    }


def main() -> None:
    """Prints the table and, with --out, writes the JSON."""
    parser = common.parser(__doc__)
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8], help="simulated, on CPU")
    parser.add_argument("--layouts", nargs="+", default=["ddp", "fsdp"], choices=("ddp", "fsdp"), help="of 8 devices")
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--precision", choices=tuple(LOSS_TOLERANCE))
    parser.add_argument("--remat", choices=("none", "full"), default="none")
    parser.add_argument("--block", type=int, default=8, help="steps of a turn")
    parser.add_argument("--blocks", type=int, default=12, help="turns of each")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(json.loads(args.child))))
        return
    on_gpu = args.platform == "gpu"
    if args.quick:
        args.sizes, args.block, args.blocks = ["tiny"], 3, 2
        args.devices = args.devices[:1]
    sizes = args.sizes or (["gpu-small", "gpu-medium"] if on_gpu else ["tiny", "small", "medium"])
    rows, results = [], []
    for devices in [1] if on_gpu else args.devices:
        for layout in args.layouts if devices > 1 else ["ddp"]:
            for size in sizes:
                spec = {
                    "size": size, "shape": SIZES[size], "layout": layout, "devices": devices, "block": args.block,
                    "blocks": args.blocks, "precision": args.precision or ("bf16" if on_gpu else "fp32"),
                    "remat": args.remat,
                }  # fmt: skip
                env = {} if on_gpu else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
                result = common.in_child(__file__, spec, env)
                results.append({"point": spec, **result})
                rows.append(shown(spec, result))
                print(rows[-1], file=sys.stderr)
    where = next((r["machine"] for r in results if "machine" in r), common.machine())
    print(common.title(where))
    print(common.table(sorted(rows, key=lambda row: "error" in row)))
    common.report("overhead", args, results, where)
    if all("error" in result for result in results):
        raise SystemExit("nothing was measured: " + results[0]["error"])


if __name__ == "__main__":
    main()
