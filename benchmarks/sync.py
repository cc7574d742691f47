"""Loss, bytes and time of every way in which replicas can agree: one model, the same tokens, each its learning rate.

    python benchmarks/sync.py [--only NAME ...] [--size small large] [--minutes N] --out sync.json

A decoder on the source files of Python's standard library. `--out` keeps every run and is read again, so that a call
goes on where the last one stopped (`--minutes` begins no run after so many). Each strategy is tried at a learning rate,
at half and at twice of it, and further while the best one is at an end.

    loss      validation loss of the best learning rate at the end, and its distance from that of `bsp`
    bytes     that a replica sends in a step on the mean, and how many times fewer than those of `bsp` in float32
    wall      virtual time of the whole run, see sync_times.py: one replica is half as fast as the others, and over the
              link the float32 gradients of a step take as long as a step (`slow`), or ten times as long (`slowest`)

Prints the table; docs/images/sync.svg is drawn by sync_figure.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import common

EVERY = 16
LARGE = {
    "model": {"embed": 384, "layers": 8, "mlp": 672, "heads": 6, "kv_heads": 3},
    "replicas": 2,
    "ways": ("bsp", "diloco-int4-2", "streaming-int4-2"),
}
SIZES: dict[str, dict[str, Any]] = {  # `replicas`: at most so many; `ways`: only these, without a GPU
    "small": {"model": {"embed": 128, "layers": 4, "mlp": 512, "heads": 4, "kv_heads": 2}, "steps": 4032, "lr": 2e-3},
    "large": LARGE | {"steps": 4032, "lr": 2.5e-4},  # the rate that was best in large-half
    "large-half": LARGE | {"steps": 2016, "lr": 1e-3},
    "quick": {"model": {"embed": 32, "layers": 4, "mlp": 64, "heads": 2}, "steps": 112, "lr": 4e-3},
}
# On a busy machine a device waits for the others longer than the 40 s after which XLA ends the process.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=3600 --xla_cpu_collective_timeout_seconds=3600"


@dataclass(frozen=True)
class Way:
    """One way to agree.

    Attributes:
        sync: section of the config.
        replicas: their number.
        optimizer: name of the optimizer.
        lr: first learning rate that is tried, in those of `bsp`.
        compared: way whose loss the bar is held against.
        bar: largest relative distance from that, None: no bar.
        fewer: how many times fewer bytes than `bsp` it must send.
    """

    sync: dict[str, Any]
    replicas: int = 4
    optimizer: str = "adamw"
    lr: float = 1.0
    compared: str = "bsp"
    bar: float | None = None
    fewer: float = 0.0


def diloco(bits: str = "none", every: int = 16, **more: Any) -> dict[str, Any]:
    outer = {"lr": 0.8, "momentum": 0.5}
    return {"strategy": "diloco", "every": every, "outer": outer, "compress": {"deltas": bits}} | more


def streaming(bits: str) -> dict[str, Any]:
    fragments = {"fragments": 4, "tau": 2, "alpha": 0.0}  # of as many layers each: shorter ones are filled up
    return diloco(bits, 56, strategy="streaming_diloco", streaming=fragments)


def compressed(gradients: str, **more: Any) -> dict[str, Any]:
    return {"compress": {"gradients": gradients, **more}}


WAYS = {
    "bsp": Way({}),
    "bsp-int8": Way(compressed("int8"), bar=0.01),
    "bsp-fp8": Way(compressed("fp8")),
    "bsp-int4": Way(compressed("int4")),
    "bsp-int2": Way(compressed("int2")),
    "bsp-powersgd-4": Way(compressed("powersgd", rank=4, warmup=1000), bar=0.01),  # as torch's hook
    "bsp-powersgd-4-cold": Way(compressed("powersgd", rank=4)),
    "bsp-topk-1%": Way(compressed("topk", share=0.01)),
    "bsp-onebit-adam": Way(compressed("onebit_adam", freeze=800)),
    "local_sgd": Way({"strategy": "local_sgd", "every": EVERY}),
    "post_local": Way({"strategy": "post_local", "every": EVERY, "bsp_steps": 448}),
    "diloco-int4-2": Way(diloco("int4"), 2, lr=0.5, bar=0.02, fewer=100),
    "diloco-int4-4": Way(diloco("int4"), lr=0.5),
    "diloco-4": Way(diloco(), lr=0.5),
    "diloco-112-2": Way(diloco(every=112), 2, lr=0.5),
    "streaming-int4-2": Way(streaming("int4"), 2, lr=0.5, bar=0.03, fewer=400),
    "streaming-4": Way(streaming("none"), lr=0.5),
    "streaming-int4-4": Way(streaming("int4"), lr=0.5),
    "muloco-float32-4": Way(diloco(every=56, strategy="muloco"), optimizer="muon", lr=0.5),
    "muloco-4": Way(
        diloco("int2", 56, strategy="muloco"), optimizer="muon", lr=0.5, compared="muloco-float32-4", bar=0.01
    ),
    "gossip-ring": Way({"strategy": "gossip", "every": 1, "gossip": {"graph": "ring"}}),
    "gossip-exponential": Way({"strategy": "gossip", "every": 1, "gossip": {"graph": "exponential"}}),
    "gossip-matching": Way({"strategy": "gossip", "every": 1, "gossip": {"graph": "matching"}}),
    "ssp-3": Way({"strategy": "ssp", "stale": {"bound": 3}}, lr=0.5),
    "asp": Way({"strategy": "asp"}, lr=0.5),
}


def way_of(name: str, size: str) -> Way:
    """The way, with no more replicas than the size has."""
    way = WAYS[name]
    return dataclasses.replace(way, replicas=min(way.replicas, SIZES[size].get("replicas", way.replicas)))


def config_of(way: Way, size: str, lr: float, folder: str) -> Any:
    """The config of a run; `steps` are those of `bsp`."""
    import sync_times

    import jaxtrain

    setting, sync = SIZES[size], dict(way.sync)
    if sync.get("strategy") in ("ssp", "asp"):
        clocks = {"speeds": sync_times.speeds(way.replicas), "jitter": sync_times.JITTER, "seed": sync_times.SEED}
        sync["stale"] = sync.get("stale", {}) | clocks
    base = {
        "name": "run", "dir": folder, "simulate": way.replicas, "steps": setting["steps"], "precision": "fp32",
        "layout": "ddp", "mesh": {"replica": way.replicas, "data": 1}, "model": setting["model"], "sync": sync,
        "data": {
            "sources": [{"path": "stdlib"}], "sequence": 64, "global_batch": 4, "validation_fraction": 0.05,
        },
        "optimizer": {"name": way.optimizer, "lr": lr}, "schedule": {"name": "cosine", "warmup_steps": 40},
        "log": {"sample_tokens": 0, "tensorboard": False},
    }  # fmt: skip
    config = jaxtrain.load(None, base=base)
    steps = sync_times.steps_of(config)
    every = max(1, steps // 10)
    more = (
        f"steps={steps}",
        f"eval.every={every}",
        f"eval.batches={4 if size == 'quick' else 48}",
        f"checkpoint.every={steps}",
    )
    return jaxtrain.load(None, *more, base=base)


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Trains once, and returns its curve, its bytes and its virtual times."""
    import jax
    import sync_times

    import jaxtrain
    from jaxtrain.core.program import build_program
    from jaxtrain.data.dataset import open_dataset
    from jaxtrain.models.spec import vocabulary_size

    way = way_of(spec["way"], spec["size"])
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(way, spec["size"], spec["lr"], folder)
        result = jaxtrain.train(config)
        lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [(line["step"], line["tokens"], line["eval/loss"]) for line in lines if "eval/loss" in line]
    data = open_dataset(config.data, config.seed)
    program = build_program(config, vocabulary_size(config.model, data.vocab), jax.devices())
    steps = [step for step, _, _ in points]
    network = sync_times.Network(program.synchronizer, program.one["params"], way.replicas)
    return {
        "way": spec["way"], "size": spec["size"], "lr": spec["lr"], "steps": steps,
        "tokens": [tokens for _, tokens, _ in points], "losses": [loss for _, _, loss in points],
        "unigram_entropy": data.unigram_entropy, "parameters": network.values,
        "sent": network.sent_bytes(steps), "bsp_bytes": network.gradient_bytes,
        "wall": {name: network.wall_times(steps, link) for name, link in sync_times.LINKS.items()},
    }  # fmt: skip


def next_run(runs: list[dict[str, Any]], way: str, size: str) -> float | None:
    """The learning rate to try next; None: the best one has neighbours on both sides, or its runs diverge."""
    found = {run["lr"]: run["losses"][-1] for run in runs if run["way"] == way and run["size"] == size}
    return common.next_rate(found, SIZES[size]["lr"] * WAYS[way].lr)


def best_runs(runs: list[dict[str, Any]], size: str) -> dict[str, dict[str, Any]]:
    """The run of each way with the lowest loss."""
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        own = [run for run in runs if run["way"] == way and run["size"] == size and math.isfinite(run["losses"][-1])]
        if own:
            found[way] = min(own, key=lambda run: run["losses"][-1])
    return found


def rows(best: dict[str, dict[str, Any]], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table; `bar` says what a way is held to, and whether it is met."""
    out = []
    for name, run in best.items():
        way, loss = way_of(name, run["size"]), run["losses"][-1]
        base = best[way.compared]["losses"][-1] if way.compared in best else math.nan
        sent = run["sent"][-1] / SIZES[run["size"]]["steps"]
        against, fewer = loss / base - 1, run["bsp_bytes"] / sent
        tried = sum(other["way"] == name and other["size"] == run["size"] for other in runs)
        out.append({
            "way": name, "replicas": way.replicas, "lr": f"{run['lr']:g}", "tried": tried, "loss": round(loss, 4),
            "against": f"{100 * against:+.2f}%" + ("" if way.compared == "bsp" else f" of {way.compared}"),
            "bytes a step": round(sent), "fewer": round(fewer, 1),
            "wall slow": round(run["wall"]["slow"][-1]), "wall slowest": round(run["wall"]["slowest"][-1]),
            "bar": "" if way.bar is None else _bar(way, against, fewer),
        })  # fmt: skip
    return out


def _bar(way: Way, against: float, fewer: float) -> str:
    met = against <= way.bar and fewer >= way.fewer
    return f"{100 * way.bar:.0f}%" + (f" at {way.fewer:.0f}x" if way.fewer else "") + (" met" if met else " NOT met")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=WAYS, help="these ways alone")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["small"])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    args = parser.parse_args()
    if args.child:
        return print(json.dumps(train(json.loads(args.child))))
    sizes, ways = (["quick"], ["bsp", "diloco-int4-2"]) if args.quick else (args.size, args.only or list(WAYS))
    runs = json.loads(args.out.read_text())["results"]["runs"] if args.out and args.out.exists() else []
    end = time.monotonic() + 60 * args.minutes
    for size in sizes:
        limited = [way for way in ways if way in SIZES[size].get("ways", WAYS)]
        for turn in range(1 if args.quick else 8):  # each way once, then its other learning rates
            for way in limited:
                tried = sum(run["way"] == way and run["size"] == size for run in runs)
                lr = next_run(runs, way, size)
                if lr is None or tried > turn or time.monotonic() > end:
                    continue
                spec = {"way": way, "size": size, "lr": lr}
                env = {"JAX_NUM_CPU_DEVICES": str(way_of(way, size).replicas), "XLA_FLAGS": PATIENT}
                run = common.in_child(__file__, spec, env, timeout=4 * 3600)
                if "error" in run:
                    print(f"{way} at {lr:g}: {run['error']}")
                    if "finite" not in run["error"]:
                        continue
                    run = spec | {"losses": [math.inf]}
                runs.append(run)
                print(f"{size} {way} at {lr:g}: {run['losses'][-1]:.4f}", flush=True)
                report(args, runs)
        best = best_runs(runs, size)
        print(common.table(rows(best, runs)))
        if "bsp" in best:
            share = best["bsp"]["losses"][-1] / best["bsp"]["unigram_entropy"]
            print(
                f"{size}: {best['bsp']['parameters']:,} parameters; bsp is at {100 * share:.1f}% of the unigram entropy"
            )
    report(args, runs)


def report(args: Any, runs: list[dict[str, Any]]) -> None:
    """Writes what there is."""
    table = {size: rows(best_runs(runs, size), runs) for size in SIZES if any(run["size"] == size for run in runs)}
    common.report("sync", args, {"table": table, "runs": runs}, common.machine())


if __name__ == "__main__":
    main()
