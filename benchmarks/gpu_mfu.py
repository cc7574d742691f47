"""Speed of dense decoders on one GPU: tokens/s, TFLOP/s, MFU, peak memory, and time of a step by part.

    python benchmarks/gpu_mfu.py [--shapes 0.4b 1.3b 7b] [--rows N] [--accumulate N] [--remat none full dots ...]
                                 [--attention auto xla] [--chunks 8 1] [--flags default no-triton] [--unroll all 1]
                                 [--sweep] [--out gpu_mfu.json]
    python benchmarks/gpu_mfu.py --target h200      # without a GPU: compiles the same steps and reports their memory

It times `program.step`, the step that `jaxtrain train` runs, on packed batches of `--documents` random documents a
row, sequence 4096, bf16 with float32 masters and AdamW in float32 (7b on 80 GiB: all bf16). Every point is a fresh
process, with its own memory peak. MFU is in jaxtrain's convention (jaxtrain.models.flops: a row counts
as one causal document, nothing recomputed counts); `mfu, attended` counts only the pairs of tokens that may attend to
each other in packed documents. The peak is that of jaxtrain.planning.hardware.peak: dense bf16.

Times are read from a profile of three steps (per kernel, by the scope of its operation):
attention, matmul, loss (head matmul and cross-entropy), optimizer (with the clip), rest (norms, rotary, activations,
copies) and idle. `--breakdown ablation` times parts separately instead: forward, forward + backward, the loss, the
optimizer.

XLA flags: `default` is jaxtrain's, none. Without a GPU it says so and exits with status 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import breakdown
import common
import numpy as np

from jaxtrain.planning.hardware import chips, targets

MODELS = {"tiny": "llama_tiny", "0.4b": "llama_400m", "1.3b": "llama_1b", "7b": "llama2_7b"}
VOCAB, LENGTH = 32000, 4096
# Saves every matmul output that backward needs and computes norms, rotary and activations again: of the memory that
# `none` takes a quarter, and no matmul runs twice.
SELECTIVE = ["attention", "q", "k", "v", "gate", "up", "residual"]
# By GPU memory: (GiB at least, points of (rows, microbatches, remat, precision)); the first that the GPU is large
# enough for counts. What fits was asked of `--target`; `--sweep` looks for better.
DEFAULTS: dict[str, list[tuple[int, list[tuple[int, int, Any, str]]]]] = {
    "tiny": [(0, [(2, 1, "none", "bf16")])],
    "0.4b": [
        (120, [(16, 1, SELECTIVE, "bf16"), (12, 1, "none", "bf16")]),
        (0, [(8, 1, SELECTIVE, "bf16"), (6, 1, "none", "bf16")]),
    ],
    "1.3b": [
        (120, [(16, 1, SELECTIVE, "bf16"), (6, 1, "none", "bf16")]),
        (0, [(6, 1, SELECTIVE, "bf16"), (2, 1, "none", "bf16")]),
    ],
    "7b": [
        (120, [(6, 1, SELECTIVE, "bf16_pure"), (2, 1, SELECTIVE, "bf16")]),
        (0, [(2, 1, SELECTIVE, "bf16_pure")]),
    ],
}
FLAGS = {
    "default": "",
    "no-triton": "--xla_gpu_enable_triton_gemm=false",
    "no-graphs": "--xla_gpu_enable_command_buffer=",
    "graphs-of-branches": "--xla_gpu_enable_command_buffer=+CONDITIONAL",
    "cudnn-fusion": "--xla_gpu_cudnn_gemm_fusion_level=1",
}
MOST = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94"}  # of the GPU's memory; JAX itself takes 0.75
SWEEP = {"rows": [2, 4, 8, 12], "remat": ["none", SELECTIVE, ["attention", "q", "k", "v"], "dots", "full"],
         "attention": ["cudnn", "xla"]}  # fmt: skip
CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "models"


def make_config(spec: dict[str, Any]) -> Any:
    """Config of a point."""
    import jaxtrain

    base = {
        "precision": spec["precision"], "steps": 1000,
        "data": {"sequence": spec["length"], "global_batch": spec["rows"]},
        "optimizer": {"lr": 1e-4}, "schedule": {"name": "constant"}, "loss": {"vocab_chunks": spec["chunks"]},
        "step": {**common.remat(spec["remat"]), "microbatches": spec["accumulate"], "attention": spec["attention"],
                 "unroll": 0 if spec["unroll"] == "all" else spec["unroll"]},
        "model": {"vocab": VOCAB},
    }  # fmt: skip
    return jaxtrain.load(CONFIGS / f"{MODELS[spec['shape']]}.yaml", base=base)


def attended(batch: dict[str, np.ndarray]) -> float:
    """Mean number of keys that a query attends to in its document."""
    return float(batch["positions"].mean() + 1)


def flops_per_token(config: Any, batch: dict[str, np.ndarray]) -> dict[str, float]:
    """FLOPs per token by jaxtrain's convention, and with only the attended pairs."""
    from jaxtrain.models.flops import decoder_flops, layer_matmuls

    whole = decoder_flops(config.model, VOCAB, config.data.sequence).model
    matmuls = layer_matmuls(config.model, attended(batch))
    return {
        "mfu": whole,
        "attended": 3.0 * (config.model.layers * sum(matmuls.values()) + 2 * config.model.embed * VOCAB),
    }


def timed_steps(step: Any, state: Any, batch: Any, seconds: float) -> tuple[Any, list[float], float]:
    """State, seconds per step of several blocks, the last loss; steps are dispatched ahead."""
    import jax

    def block(state: Any, count: int) -> tuple[Any, Any, float]:
        begin, before, metrics = time.perf_counter(), None, None
        for _ in range(count):
            state, metrics = step(state, batch)
            if before is not None:
                jax.block_until_ready(before)
            before = metrics
        jax.block_until_ready(metrics)
        return state, metrics, (time.perf_counter() - begin) / count

    state, metrics, _ = block(state, 2)
    state, metrics, once = block(state, 2)
    count = max(2, min(50, round(seconds / 4 / once)))
    times = []
    for _ in range(4):
        state, metrics, took = block(state, count)
        times.append(took)
    return state, times, float(metrics["loss"])


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """One point, in this process."""
    import jax

    from jaxtrain.core.placement import batch_sharding
    from jaxtrain.core.program import build_program
    from jaxtrain.planning.hardware.peak import device_peak

    device = jax.devices()[0]
    if device.platform != spec["platform"]:
        raise SystemExit(f"JAX has no {spec['platform']} here, only {device.platform}")
    config = make_config(spec)
    program = build_program(config, VOCAB, [device])
    host = common.packed_batch(0, spec["rows"], spec["length"], VOCAB, spec["documents"])
    batch = jax.device_put(host, batch_sharding(program.sharder, 2, True))
    state = program.init()
    begin = time.perf_counter()
    compiled = program.step.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - begin
    state, times, loss = timed_steps(compiled, state, batch, spec["seconds"])
    seconds = common.spread(times)
    tokens = spec["rows"] * spec["length"]
    flops = flops_per_token(config, host)
    peak = device_peak(device)
    out = {
        "machine": common.machine(), "device": device.device_kind, "compile_seconds": compile_seconds,
        "seconds": seconds, "tokens_per_sec": tokens / seconds["median"], "loss": loss,
        "flops_per_token": flops, "tflops": flops["mfu"] * tokens / seconds["median"] / 1e12,
        "peak": str(peak), "memory": memory(compiled, device.memory_stats() or {}),
        "calls": breakdown.custom_calls(compiled.as_text()),
    }  # fmt: skip
    if peak is not None:
        rate = out["tokens_per_sec"] / peak.flops
        out |= {"mfu": flops["mfu"] * rate, "mfu_attended": flops["attended"] * rate}
    if spec["breakdown"] == "trace":
        with tempfile.TemporaryDirectory() as folder:
            out["breakdown"] = breakdown.of_steps(compiled, state, batch, Path(folder), steps=3)
    elif spec["breakdown"] == "ablation":
        out["ablation"] = breakdown.ablation(program, state, batch)
    return out


def memory(compiled: Any, stats: dict[str, int]) -> dict[str, Any]:
    """Bytes that the compiler plans for the step, and the allocator's peak if `stats` of the device have it."""
    from jaxtrain.planning.cost.memory import compiled_memory

    plan = compiled_memory(compiled)
    return {
        "arguments": plan.arguments, "temporaries": plan.temporaries, "planned_peak": plan.peak,
        "peak": stats.get("peak_bytes_in_use"), "limit": stats.get("bytes_limit"),
    }  # fmt: skip


def compile_only(spec: dict[str, Any]) -> dict[str, Any]:
    """Compiles the step of a point for an absent GPU."""
    from jaxtrain.core.program import build_program
    from jaxtrain.planning.step_program import compile_step

    devices = targets.devices(spec["target"])
    config = make_config(spec)
    program = build_program(config, VOCAB, devices)
    host = common.packed_batch(0, 1, spec["length"], VOCAB, spec["documents"])
    begin = time.perf_counter()
    compiled = compile_step(program, host)
    return {
        "machine": common.machine(), "device": f"{devices[0].device_kind}, absent",
        "compile_seconds": time.perf_counter() - begin,
        "memory": memory(compiled, {"bytes_limit": int(chips.CHIPS[spec["target"]].memory.value)}),
        "calls": breakdown.custom_calls(compiled.as_text()), "flops_per_token": flops_per_token(config, host),
    }  # fmt: skip


def probe() -> dict[str, Any]:
    """Devices of this machine, and their memory in GiB."""
    import jax

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return {"platform": device.platform, "kind": device.device_kind, "gib": limit / 2**30, "machine": common.machine()}


def points(args: argparse.Namespace, gib: float, platform: str) -> list[dict[str, Any]]:
    """Default point of every shape, or the grid of the given options."""
    names = ("rows", "accumulate", "remat", "attention", "chunks", "flags", "precision", "unroll")
    fixed = {
        "length": args.length, "documents": args.documents, "seconds": args.seconds, "platform": platform,
        "target": args.target, "breakdown": args.breakdown,
    }  # fmt: skip
    given = any((args.rows, args.accumulate, args.remat, args.attention, args.precision))
    out = []
    for shape in args.shapes:
        known = next((points for least, points in DEFAULTS[shape] if gib >= least), DEFAULTS[shape][-1][1])
        for rows, accumulate, remat, precision in known[:1] if args.sweep or given else known:
            grid = (
                args.rows or (SWEEP["rows"] if args.sweep else [rows]),
                args.accumulate or [accumulate],
                args.remat or (SWEEP["remat"] if args.sweep else [remat]),
                args.attention or (SWEEP["attention"] if args.sweep else ["auto"]),
                args.chunks,
                args.flags,
                args.precision or [precision],
                args.unroll,
            )
            out += [{"shape": shape, **fixed, **dict(zip(names, values))} for values in itertools.product(*grid)]
    return out


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    spec = result["point"]
    remat = spec["remat"] if isinstance(spec["remat"], str) else "+".join(spec["remat"])
    row: dict[str, Any] = {"shape": spec["shape"], "rows": spec["rows"], "micro": spec["accumulate"], "remat": remat,
           "attention": spec["attention"], "chunks": spec["chunks"], "flags": spec["flags"],
           "precision": spec["precision"], "unroll": spec["unroll"]}  # fmt: skip
    if "error" in result:
        return row | {"error": result["error"][:120]}
    gib = {name: value / 2**30 for name, value in result["memory"].items() if value}
    if spec["target"]:
        fits = gib.get("planned_peak", 0.0) < 0.94 * gib["limit"]
        calls = sum(count for name, count in result["calls"].items() if "fmha" in name)
        return row | {
            "planned GiB": gib.get("planned_peak"), "fits": "yes" if fits else "no", "cuDNN attention calls": calls,
            "compile s": result["compile_seconds"],
        }  # fmt: skip
    row |= {
        "ms": result["seconds"]["median"] * 1e3, "tokens/s": result["tokens_per_sec"], "TFLOP/s": result["tflops"],
        "MFU %": 100 * result["mfu"] if "mfu" in result else None,
        "attended %": 100 * result["mfu_attended"] if "mfu" in result else None,
        "peak GiB": gib.get("peak", gib.get("planned_peak")), "compile s": result["compile_seconds"],
    }  # fmt: skip
    shares = result.get("breakdown", {}).get("shares", {})
    return row | {f"{name} %": 100 * share for name, share in shares.items()}


def environment(spec: dict[str, Any]) -> dict[str, str]:
    """Environment of a point's process: flags must be set before JAX starts."""
    if spec["target"]:
        return targets.environment(targets.parse(spec["target"]))
    return {"XLA_FLAGS": FLAGS[spec["flags"]]} | MOST


def arguments() -> argparse.Namespace:
    """Parses the command line; `--quick` is the tiny shape on any device."""
    parser = common.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=["0.4b", "1.3b", "7b"])
    parser.add_argument("--rows", type=int, nargs="+", help="sequences per step")
    parser.add_argument("--accumulate", type=int, nargs="+", help="microbatches per step")
    parser.add_argument("--remat", nargs="+", type=lambda text: text.split("+") if "+" in text else text,
                        help="none, full, dots, or saved names joined by +")  # fmt: skip
    parser.add_argument("--attention", nargs="+", choices=("auto", "cudnn", "xla", "reference"))
    parser.add_argument("--chunks", type=int, nargs="+", default=[8], help="of the vocabulary; 1 keeps the logits")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "bf16_pure", "fp32"))
    parser.add_argument("--unroll", nargs="+", default=["all"], type=lambda text: text if text == "all" else int(text),
                        help="layers in a turn of the loop over them, or all: no loop")  # fmt: skip
    parser.add_argument("--flags", nargs="+", choices=FLAGS, default=["default"], help="sets of XLA flags")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--documents", type=int, default=4, help="a row")
    parser.add_argument("--seconds", type=float, default=12.0, help="of measured steps, about")
    parser.add_argument("--breakdown", choices=("trace", "ablation", "none"), default="trace")
    parser.add_argument("--sweep", action="store_true", help="rows x remat x attention")
    parser.add_argument("--target", choices=("h100", "h200"), help="compile for this GPU, absent")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.shapes, args.length, args.seconds = ["tiny"], 128, 0.1
    return args


def main() -> None:
    """Prints the table and, with --out, writes the JSON."""
    args = arguments()
    if args.child:
        spec = json.loads(args.child)
        run = {"probe": lambda _: probe(), "compile": compile_only, "measure": measure}[spec["what"]]
        print(json.dumps(run(spec)))
        return
    if args.target:
        here: dict[str, Any] = {"platform": "gpu", "gib": {"h100": 79.0, "h200": 139.0}[args.target]}
        reason = targets.missing_packages(targets.parse(args.target))
    else:
        here = common.in_child(__file__, {"what": "probe"}, MOST)
        no_gpu = f"gpu_mfu needs a GPU: JAX has {here.get('kind', here.get('error'))} here"
        reason = None if here.get("platform") == "gpu" or (args.quick and "error" not in here) else no_gpu
    if reason:
        common.report("gpu_mfu", args, [], common.machine(), reason, skipped=reason)
        return
    results = []
    for spec in points(args, here["gib"], here["platform"]):
        what = "compile" if args.target else "measure"
        results.append({"point": spec, **common.in_child(__file__, spec | {"what": what}, environment(spec))})
        print(shown(results[-1]), file=sys.stderr, flush=True)
        where = next((r["machine"] for r in results if "machine" in r), here.get("machine", common.machine()))
        common.report("gpu_mfu", args, results, where, xla_flags={name: FLAGS[name] for name in args.flags})
    print(common.title(where))
    for shape in args.shapes:
        print(common.table([shown(result) for result in results if result["point"]["shape"] == shape]))


if __name__ == "__main__":
    main()
