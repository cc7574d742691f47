"""Plans extrapolated from smaller pods, against the step compiled for all devices.

    python benchmarks/plan_pods.py [--only zero] [--out FILE]

`jaxtrain plan` compiles steps for up to 32,768 devices; above, it compiles one or two pods with fewer replicas or
shards (`jaxtrain/planning/pods.py`). Here both are done, in separate processes without a cache, for clusters that
compile within minutes. Ratios are of the plan from pods to the plan of the full cluster. Needs the extras `plan-gpu`
and `plan-tpu`; a target whose compiler is not installed is left out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import common

from jaxtrain.core.resolve import resolve
from jaxtrain.planning import pods, predict
from jaxtrain.planning.hardware import targets

ROOT = Path(__file__).resolve().parent.parent
STEP = ("step.remat=full", "precision=bf16", "data.sequence=4096")
R405, M70, M8 = "recipes/llama3_405b.yaml", "models/llama3_70b.yaml", "models/llama3_8b.yaml"
PARTS = "step.microbatches=16"
CASES = {  # name -> devices of the largest pod, target, config and keys
    "8B, hsdp": (1024, "h100:256x8", M8, *STEP, "data.global_batch=4096", "layout=hsdp", "mesh.data=32",
                 "mesh.fsdp=64"),
    "8B, hsdp, a pod of an eighth": (256, "h100:256x8", M8, *STEP, "data.global_batch=4096", "layout=hsdp",
                                     "mesh.data=32", "mesh.fsdp=64"),
    "8B, fsdp": (1024, "h100:256x8", M8, *STEP, "data.global_batch=4096", "layout=fsdp", "mesh.fsdp=2048"),
    "8B, fsdp, pods of an eighth": (256, "h100:256x8", M8, *STEP, "data.global_batch=4096", "layout=fsdp",
                                    "mesh.fsdp=2048"),
    "8B, zero 2": (1024, "h100:256x8", M8, *STEP, "data.global_batch=4096", "layout=ddp", "mesh.data=2048", "zero=2"),
    "8x7B, experts": (1024, "h100:256x8", "models/mixtral_8x7b.yaml", *STEP, "data.global_batch=4096", "layout=ep",
                      "mesh.fsdp=256", "mesh.expert=8"),
    "405B, pp x fsdp x tp": (8192, "h100:2048x8", R405, "data.global_batch=2048", PARTS,
                             "mesh={pipeline: 16, fsdp: 128, model: 8}"),
    "405B, pp x fsdp x tp, pods of a quarter": (4096, "h100:2048x8", R405, "data.global_batch=2048", PARTS,
                                                "mesh={pipeline: 16, fsdp: 128, model: 8}"),
    "405B, pp x zero 1 x tp": (4096, "h100:2048x8", R405, "data.global_batch=2048", PARTS, "layout=pp",
                               "mesh={pipeline: 16, data: 128, fsdp: 1, model: 8}", "zero=1", "rules.sequence=model"),
    "405B, pp x hsdp x tp": (pods.MAX_DEVICES, "h100:16384x8", R405, "data.global_batch=16384", PARTS,
                             "rules.batch=[data,fsdp]", "mesh={pipeline: 16, data: 8, fsdp: 128, model: 8}"),
    "70B, hsdp over slices": (1024, "v5p:8x8x8*8", M70, *STEP, "data.global_batch=8192", "layout=hsdp", "mesh.data=16",
                              "mesh.fsdp=256", "mesh.dcn={data: 8}"),
    "70B, fsdp over slices": (512, "v5p:4x4x8*8", M70, *STEP, "data.global_batch=2048", "layout=fsdp",
                              "mesh.fsdp=1024", "mesh.dcn={fsdp: 8}"),
}  # fmt: skip


def compared(name: str, largest: int, target: str, file: str, *keys: str) -> dict[str, Any]:
    """A row: seconds of both ways, and ratios of the plan from pods to that of the full cluster."""
    config, _ = resolve(str(ROOT / "configs" / file), *keys, paths=False)
    plans, seconds = [], []
    for most in (None, largest):
        start = time.perf_counter()
        plans.append(predict.predict(config, config.model.vocab, target, max_devices=most))
        seconds.append(time.perf_counter() - start)
    whole, told = plans
    if not told.pods or not whole.can_run:
        return {"name": name, "target": target, "error": "; ".join([whole.reason, *told.notes[-1:]])}
    assert whole.step_seconds is not None
    assert told.step_seconds is not None
    assert whole.compute_seconds is not None
    assert told.compute_seconds is not None
    return {
        "name": name, "target": target, "layout": whole.layout.partition(": ")[2], "pods": " and ".join(told.pods),
        "whole s": seconds[0], "pods s": seconds[1],
        "needs GB": whole.needs / 1e9, "memory": told.needs / whole.needs,
        "sent GB": whole.wire_bytes / 1e9, "sent": told.wire_bytes / whole.wire_bytes,
        "computing": told.compute_seconds / whole.compute_seconds,
        "step s": whole.step_seconds, "step": told.step_seconds / whole.step_seconds,
    }  # fmt: skip


def main() -> int:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", help="a part of the names or targets")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (largest, target, *given) in CASES.items():
        if args.only not in f"{name} {target}":
            continue
        if problem := targets.missing_packages(targets.parse(target)):
            print(f"{name}: left out: {problem}")
            continue
        rows.append(compared(name, largest, target, *given))
        print(common.table(rows[-1:]), file=sys.stderr, flush=True)
        if args.quick:
            break
    print(common.table([row for row in rows if "error" not in row]))
    common.report("plan_pods", args, rows, common.machine("libtpu", "jax-cuda13-plugin"))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "benchmarks"))
    raise SystemExit(main())
