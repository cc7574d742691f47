"""Compares islands of DiLoCo's published recipe with one worker and with a larger batch, as its paper does.

    python benchmarks/islands_recipe.py [--seeds 0] [--only WAY ...] [--minutes N] --out recipe.json

The recipe of DiLoCo (Douillard et al. 2023, arXiv 2311.08105), which OpenDiLoCo (Jaghouar et al. 2024, arXiv
2407.07852) reproduces: inner AdamW with cosine and clipping to norm 1, outer SGD with Nesterov, lr 0.7, momentum 0.9,
rounds of `every` steps, the same learning rate for all ways. Here a decoder of 1.08M parameters on the source files of
Python's standard library, from scratch, and steps of 2 rows of 64 tokens of a worker. Ways:

`one worker`      no communication
`4 x batch`       data parallel: each step has the rows of all workers (one process; it equals `bsp` of islands)
`4 x steps`       one worker for four times as many steps: as many tokens and computation as those of 4 workers
`diloco, every N` four islands by `jaxtrain launch islands`; 10 is the published share of the steps (500 of 88,000 is
                  0.6%, 10 of 2,000 is 0.5%), 50 is one of OpenDiLoCo's lengths

`gap` is the loss less that of `one worker`: its share of a perplexity. All ways are validated on the same rows. Beside
it the published gap, of 8 workers, a model of 150M parameters, every 500: perplexities of 16.23, 15.30, 14.72 and
15.02 by the first paper, quoted from memory. So compare signs and the order, not sizes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
from islands_runs import SIZES

WORKERS, ROWS, SEQUENCE, STEPS, RATE, WARMUP = 4, 2, 64, 2000, 2e-3, 100
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
VALIDATED = 512  # rows of a validation
ALONE, BATCH, LONGER = "one worker", f"{WORKERS} x batch", f"{WORKERS} x steps"
EVERY = {f"diloco, every {every}": every for every in (10, 50)}
WAYS = (ALONE, BATCH, LONGER, *EVERY)
PUBLISHED = {ALONE: 16.23, BATCH: 15.30, LONGER: 14.72, "diloco": 15.02}  # perplexity
LIMIT = 3600.0  # seconds of a run
PATHS = f"{Path(__file__).resolve().parents[1]}:{Path(__file__).resolve().parent}"


def settings_of(way: str, seed: int, quick: bool) -> dict[str, Any]:
    """The config of a run."""
    steps = (40 if quick else STEPS) * (WORKERS if way == LONGER else 1)
    rows = ROWS * (1 if way in (ALONE, LONGER) else WORKERS)
    islands = {
        "sync": {"strategy": "diloco", "every": EVERY[way], "outer": OUTER}, "islands": {"count": WORKERS},
    } if way in EVERY else {}  # fmt: skip
    return {
        "steps": steps, "seed": seed, "precision": "fp32", "layout": "ddp", "mesh": {"data": 1},
        "model": SIZES["quick" if quick else "1M"], **islands,
        "data": {
            "sources": [{"path": "stdlib"}], "sequence": SEQUENCE, "global_batch": rows, "validation_fraction": 0.05,
        },
        "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": 0.1, "grad_clip_norm": 1.0},
        "schedule": {"name": "cosine", "warmup_steps": WARMUP if not quick else 10},
        "eval": {"every": steps // 4, "batches": VALIDATED // rows}, "checkpoint": {"every": steps},
        "log": {"sample_tokens": 0, "tensorboard": False, "every": steps // 20},
    }  # fmt: skip


def measure(way: str, seed: int, quick: bool) -> dict[str, Any]:
    """Trains once, see `trained`."""
    return {"way": way, "seed": seed} | trained(settings_of(way, seed, quick))


def trained(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trains once in processes of their own.

    Returns the seconds that it took, the validation losses by step, of all islands the first, and how far apart the
    last ones of the islands are.
    """
    islands = settings.get("islands", {}).get("count", 0)
    with tempfile.TemporaryDirectory(prefix="recipe", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        file = folder / "config.yaml"
        file.write_text(json.dumps({**settings, "name": "run", "dir": name}))
        command = ["launch", "islands"] if islands else ["train"]
        log, begun = folder / "output.log", time.monotonic()
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", "jaxtrain.cli.main", *command, str(file)], stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, timeout=LIMIT,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": PATHS},
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"jaxtrain {' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-1500:]}")
        curves = [curve_of(folder / "run" / f"island-{i}") for i in range(islands)] or [curve_of(folder / "run")]
        seconds = time.monotonic() - begun
    last = [curve[-1][1] for curve in curves]
    return {"seconds": seconds, "curve": curves[0], "apart": max(last) - min(last)}


def curve_of(folder: Path) -> list[tuple[int, float]]:
    """Steps and validation losses of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["eval/loss"]) for record in records if "eval/loss" in record]


def rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Table: means over the seeds, and the range of the gap."""
    last = {(run["way"], run["seed"]): run["curve"][-1][1] for run in runs}
    out = []
    for way in WAYS:
        seeds = [seed for other, seed in last if other == way]
        if not seeds:
            continue
        losses = [last[way, seed] for seed in seeds]
        gaps = [last[way, seed] - last[ALONE, seed] for seed in seeds if (ALONE, seed) in last]
        published = PUBLISHED["diloco" if way in EVERY else way]
        out.append({
            "way": way, "seeds": len(seeds), "loss": sum(losses) / len(losses),
            "perplexity": math.exp(sum(losses) / len(losses)), "gap": sum(gaps) / len(gaps) if gaps else None,
            "gap least": min(gaps, default=None), "gap most": max(gaps, default=None),
            "published perplexity": published, "published gap": math.log(published / PUBLISHED[ALONE]),
        })  # fmt: skip
    return out


def main() -> None:
    """Runs what is missing, compares, prints."""
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="these ways alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    args = parser.parse_args()
    runs = json.loads(args.out.read_text())["results"]["runs"] if args.out and args.out.exists() else []
    end, about = time.monotonic() + 60 * args.minutes, common.machine("ray")
    for seed in args.seeds:
        for way in args.only:
            is_known = any((run["way"], run["seed"]) == (way, seed) for run in runs)
            if is_known or time.monotonic() > end:
                continue
            runs.append(measure(way, seed, args.quick))
            print(f"{way}, seed {seed}: {runs[-1]['curve'][-1][1]:.4f} in {runs[-1]['seconds']:.0f} s", flush=True)
            common.report("islands_recipe", args, {"table": rows(runs), "runs": runs}, about)
    print(common.table(rows(runs), 4))
    common.report("islands_recipe", args, {"table": rows(runs), "runs": runs}, about)


if __name__ == "__main__":
    main()
