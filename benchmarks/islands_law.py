"""Compares the gap between islands of DiLoCo and data parallel with the published scaling laws of DiLoCo.

    python benchmarks/islands_law.py [--only WAY ...] [--minutes N] --out law.json

The recipe of Charles et al. 2025 (arXiv 2503.09799), by DiLoCo's authors: a decoder with normed queries and keys, 20
tokens for each parameter, the same number of tokens and the same global batch for all ways, rounds of 30 steps; AdamW
with betas 0.9 and 0.99 and weight decay 1/steps, clipping to norm 1, a tenth of the steps for warm-up, cosine to 5%;
outer SGD with Nesterov, momentum 0.9, lr 0.6, which was their best one for 1, 2 and 4 replicas of their smallest model.
Each way has its own learning rate: one is tried, its half and its double, and further while the best one is at an end.
Here bytes of the source files of Python's standard library, sequences of 64, no z-loss, and one batch size (theirs is
tuned, too). `data parallel` runs in one process; it equals `bsp` between islands. The others are islands by `jaxtrain
launch islands`.

`gap` is the relative difference of the loss to that of data parallel. Beside it those of their smallest model, of 35M
parameters (their table 4), and those of their power laws (table 7) at the number of parameters that we train.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
from islands_recipe import trained

MODEL = {"embed": 64, "layers": 3, "mlp": 192, "heads": 4, "kv_heads": 4, "qk_norm": "per_head"}
EVERY, ROWS, SEQUENCE, RATE = 30, 16, 64, 4e-3
OUTER = {"lr": 0.6, "momentum": 0.9, "nesterov": True}
VALIDATED = 2048  # rows of a validation


@dataclass(frozen=True)
class Way:
    """Data parallel, or some islands of diloco.

    Attributes:
        islands: their number; 0: one process.
        published: loss of 35M parameters.
        factor: of the power law of the loss, factor * parameters ** exponent.
        exponent: of the power law.
    """

    islands: int
    published: float
    factor: float
    exponent: float

    def law(self, count: int) -> float:
        """Loss of `count` parameters by the power law."""
        return self.factor * count**self.exponent


BASE = "data parallel"
WAYS = {
    BASE: Way(0, 3.485, 18.129, -0.0953),
    "diloco, 1 island": Way(1, 3.482, 18.363, -0.0961),
    "diloco, 2 islands": Way(2, 3.508, 18.768, -0.0969),
    "diloco, 4 islands": Way(4, 3.554, 19.762, -0.0992),
}


def parameters() -> int:
    """Number of parameters of the model."""
    from jaxtrain.config.sections.model import ModelConfig
    from jaxtrain.models.decoder_params import parameter_count

    return parameter_count(ModelConfig(**MODEL), vocab=257)  # bytes and the end of a text


def steps_of(count: int) -> int:
    """Steps that have 20 tokens for each of `count` parameters, in whole rounds."""
    return round(20 * count / (ROWS * SEQUENCE * EVERY)) * EVERY


def settings_of(way: str, rate: float, steps: int) -> dict[str, Any]:
    """The config of a run."""
    islands = {
        "sync": {"strategy": "diloco", "every": EVERY, "outer": OUTER}, "islands": {"count": WAYS[way].islands},
    } if WAYS[way].islands else {}  # fmt: skip
    return {
        "steps": steps, "precision": "fp32", "layout": "ddp", "mesh": {"data": 1}, "model": MODEL, **islands,
        "data": {
            "sources": [{"path": "stdlib"}], "sequence": SEQUENCE, "global_batch": ROWS, "validation_fraction": 0.05,
        },
        "optimizer": {
            "name": "adamw", "lr": rate, "betas": (0.9, 0.99), "weight_decay": 1 / steps, "grad_clip_norm": 1.0,
        },
        "schedule": {"name": "cosine", "warmup_steps": steps // 10, "min_lr_ratio": 0.05},
        "eval": {"every": steps // 2, "batches": VALIDATED // ROWS}, "checkpoint": {"every": steps},
        "log": {"sample_tokens": 0, "tensorboard": False, "every": EVERY},
    }  # fmt: skip


def rows(runs: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Table: the best run of each way, and the published gaps, for `count` parameters."""
    best = {
        way: min((run for run in runs if run["way"] == way), key=lambda run: run["curve"][-1][1])
        for way in WAYS if any(run["way"] == way for run in runs)
    }  # fmt: skip
    if BASE not in best:
        return []
    return [
        {
            "way": way, "rate": f"{run['rate']:g}", "tried": sum(other["way"] == way for other in runs),
            "loss": run["curve"][-1][1], "gap %": _gap(run["curve"][-1][1], best[BASE]["curve"][-1][1]),
            "published, 35M %": _gap(WAYS[way].published, WAYS[BASE].published),
            "law %": _gap(WAYS[way].law(count), WAYS[BASE].law(count)),
        }
        for way, run in best.items()
    ]  # fmt: skip


def _gap(loss: float, base: float) -> float:
    return 100 * (loss / base - 1)


def main() -> None:
    """Runs what is missing, compares, prints."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="these ways alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    args = parser.parse_args()
    runs = json.loads(args.out.read_text())["results"]["runs"] if args.out and args.out.exists() else []
    end, about, count = time.monotonic() + 60 * args.minutes, common.machine("ray"), parameters()
    steps = 2 * EVERY if args.quick else steps_of(count)
    for turn in range(1 if args.quick else 6):  # each way once, then its other learning rates
        for way in args.only:
            found = {run["rate"]: run["curve"][-1][1] for run in runs if run["way"] == way}
            rate = common.next_rate(found, RATE)
            if rate is None or len(found) > turn or time.monotonic() > end:
                continue
            runs.append({"way": way, "rate": rate} | trained(settings_of(way, rate, steps)))
            print(f"{way} at {rate:g}: {runs[-1]['curve'][-1][1]:.4f} in {runs[-1]['seconds']:.0f} s", flush=True)
            report(args, runs, count, steps, about)
    print(common.table(rows(runs, count), 4))
    report(args, runs, count, steps, about)


def report(args: Any, runs: list[dict[str, Any]], count: int, steps: int, about: Mapping[str, Any]) -> None:
    """Writes what there is."""
    results = {"parameters": count, "steps": steps, "table": rows(runs, count), "runs": runs}
    common.report("islands_law", args, results, about)


if __name__ == "__main__":
    main()
