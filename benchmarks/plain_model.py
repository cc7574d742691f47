"""A plain Flax transformer against the shipped decoder of the same shapes: time of a step on CPU, memory on GPUs.

    python benchmarks/plain_model.py [--steps 50] [--out plain-model.json]

The plain one is benchmarks/plain_transformer.py: nothing of jaxtrain in it, no logical names, built with `rngs` alone.
Both have the same parameters and batches. With `chunks` both compute the logits in parts: the decoder of the
vocabulary, the plain one of the tokens, as users write it.

`time`: one process builds both, gives the plain one the decoder's initial weights, checks that the losses of ten steps
agree, then times them in turns of one step. `ratio` is the median over pairs of steps of plain / decoder; `cpu ratio`
is that of processor time, which a busy machine disturbs less. The goal is 1.05.

`memory`: both compiled for GPUs that need not be present (extra `plan-gpu`): bytes per device, and bytes sent a step.
Both run cuDNN's attention, the plain one by `jax.nn.dot_product_attention`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

HERE = Path(__file__).resolve().parent
FIELDS = ("embed", "layers", "heads", "kv_heads", "mlp", "vocab", "rows", "length")
SHAPES = {
    "tiny": (64, 2, 4, 2, 160, 512, 8, 32),
    "small": (512, 4, 8, 4, 1408, 2048, 8, 128),
    "large": (2048, 16, 16, 8, 5632, 32000, 16, 2048),
}
CHUNKS = 8
TIMED = (
    ("fsdp", 1, "fp32", 1), ("ddp", 8, "fp32", 1), ("ddp", 8, "bf16", 1), ("fsdp", 8, "bf16", 1),
    ("fsdp", 8, "fp32", 1), ("fsdp", 8, "fp32", CHUNKS),
)  # fmt: skip
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}  # relative, over ten steps


def shape_of(size: str) -> dict[str, int]:
    """Sizes of a point by name."""
    return dict(zip(FIELDS, SHAPES[size]))


def make_config(
    model: str, size: str, layout: str, precision: str, chunks: int, remat: str = "none", kernel: str | None = None
) -> Any:
    """Config of the `plain` model or the `decoder`, resolved. `kernel`: attention of the plain one."""
    from jaxtrain.core.resolve import resolve

    shape = shape_of(size)
    rows, length = shape.pop("rows"), shape.pop("length")
    own = {**shape, "chunks": chunks, "kernel": kernel}
    section = {"type": "plain_transformer:Transformer", "options": own} if model == "plain" else shape
    file = {
        "layout": layout, "precision": precision, "model": section,
        "data": {"sources": [{"path": "text"}], "sequence": length, "global_batch": rows, "validation_fraction": 0},
        "optimizer": {"lr": 1e-4}, "schedule": {"name": "constant"}, "step": {"remat": remat},
    }  # fmt: skip
    if model == "decoder":
        file["loss"] = {"vocab_chunks": chunks}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(file))
        return resolve(str(path), paths=False)[0]


def plain_parameters(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the decoder's parameters under the names of the plain transformer."""
    layers = params["layers"]
    attention, mlp, kernel = layers["attention"], layers["mlp"], lambda w: {"kernel": w}
    return {
        "embed": {"embedding": params["embed"]["table"]},
        "layers": {
            "attention_norm": layers["attention_norm"], "mlp_norm": layers["mlp_norm"],
            "attention": {name: kernel(attention[name]) for name in "qkv"}
            | {"out": kernel(attention["o"].transpose(0, 2, 3, 1))},
            "gate": kernel(mlp["gate"]), "up": kernel(mlp["up"]), "down": kernel(mlp["down"].swapaxes(1, 2)),
        },
        "norm": params["final_norm"], "head": kernel(params["head"]),
    }  # fmt: skip


def time_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """One row of `time`, in this process."""
    import jax
    import numpy as np

    from jaxtrain.core.program import build_program

    shape, size = shape_of(spec["size"]), (spec["size"], spec["layout"], spec["precision"], spec["chunks"])
    programs, states = {}, {}
    for model in ("decoder", "plain"):
        programs[model] = build_program(make_config(model, *size), shape["vocab"], jax.devices())
        states[model] = programs[model].init()
    plain = programs["plain"].state["params"]
    converted = plain_parameters(jax.tree.map(np.asarray, states["decoder"]["params"]))
    put = lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding)  # noqa: E731
    states["plain"]["params"] = jax.tree.map(put, converted, plain)
    rows = programs["plain"].sharder.sharding(("batch", None))
    batches = [
        {k: jax.device_put(v, rows) for k, v in batch.items()}
        for batch in (common.packed_batch(i, shape["rows"], shape["length"], shape["vocab"], 4) for i in range(10))
    ]
    losses, wall, cpu = ({"decoder": [], "plain": []} for _ in range(3))
    for index in range(spec["steps"]):
        order = ("decoder", "plain") if index % 2 else ("plain", "decoder")
        for model in order:
            began = time.perf_counter(), time.process_time()
            states[model], metrics = programs[model].step(states[model], batches[index % 10])
            losses[model].append(float(metrics["loss"]))
            wall[model].append(time.perf_counter() - began[0])
            cpu[model].append(time.process_time() - began[1])
    off = np.abs(np.array(losses["plain"][:10]) / np.array(losses["decoder"][:10]) - 1).max()
    if not off < LOSS_TOLERANCE[spec["precision"]]:
        raise SystemExit(f"the losses differ by {off}: not the same model")
    return {
        "seconds": {model: statistics.median(wall[model][10:]) for model in wall},
        "ratio": ratio(wall), "cpu ratio": ratio(cpu), "loss difference": float(off),
    }  # fmt: skip


def ratio(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median and quartiles of plain / decoder over pairs of steps, without the first ten, of which one compiles."""
    return common.spread([plain / decoder for plain, decoder in zip(seconds["plain"][10:], seconds["decoder"][10:])])


def compiled(size: str, layout: str, target: str, chunks: int, remat: str) -> dict[str, Any]:
    """One row of `memory`: bytes per device, and bytes sent per step, of both models."""
    from jaxtrain.planning import compile

    row: dict[str, Any] = {"target": target, "layout": layout, "remat": remat, "chunks": chunks}
    for model in ("decoder", "plain"):
        config = make_config(model, size, layout, "bf16", chunks, remat, kernel="cudnn")
        report = compile.compile_report(config, config.model.vocab, target)
        row[f"{model} GB"] = report.memory.peak / 1e9
        row[f"{model} sent GB"] = sum(each.bytes for each in report.collectives) / 1e9
    row["ratio"] = row["plain GB"] / row["decoder GB"]
    row["sent ratio"] = row["plain sent GB"] / row["decoder sent GB"] if row["decoder sent GB"] else None
    return row


def timed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every row of `time` in a process of its own."""
    out = []
    for layout, devices, precision, chunks in TIMED[-2:] if args.quick else TIMED:
        row: dict[str, Any] = {"layout": layout, "devices": devices, "precision": precision, "chunks": chunks}
        spec = row | {"size": "tiny" if args.quick else "small", "steps": 14 if args.quick else args.steps}
        found = common.in_child(__file__, spec, {"JAX_NUM_CPU_DEVICES": str(devices)})
        if "error" in found:
            raise SystemExit(f"plain_model: {layout}: {found['error']}")
        out.append(row | found)
    return out


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `time` for the table."""
    named = {f"{model} s": seconds for model, seconds in row["seconds"].items()}
    spread = {f"ratio {part}": row["ratio"][part] for part in ("median", "q1", "q3")}
    first = {key: row[key] for key in ("layout", "devices", "precision", "chunks")}
    return first | named | spread | {"cpu ratio": row["cpu ratio"]["median"]}


def main() -> int:
    """Prints both tables."""
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="steps of each model; the first ten are not timed")
    parser.add_argument("--parts", nargs="+", default=["time", "memory"], choices=["time", "memory"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    if args.child:
        print(json.dumps(time_steps(json.loads(args.child))))
        return 0
    from jaxtrain.planning.hardware import targets

    results: dict[str, Any] = {"time": timed(args) if "time" in args.parts else []}
    print(common.table([flat(row) for row in results["time"]]), flush=True)
    if "memory" in args.parts:
        target = "h100:8"
        if problem := targets.missing_packages(targets.parse(target)):
            results["memory"] = {"skipped": problem}
            print(f"plain_model: {problem}")
        else:
            cases = [("fsdp", 1, "none"), ("fsdp", 1, "full"), ("ddp", 1, "none"), ("fsdp", CHUNKS, "full")]
            size = "tiny" if args.quick else "large"
            results["memory"] = [compiled(size, x, target, c, r) for x, c, r in cases[: 1 if args.quick else None]]
            print(common.table(results["memory"]))
    common.report("plain_model", args, results, common.machine())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
