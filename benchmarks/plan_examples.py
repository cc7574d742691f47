"""`jaxtrain plan` for absent clusters: plans of 8B, 70B and 405B steps, and their run time.

    python benchmarks/plan_examples.py [--only h100] [--out FILE]

Each row is one command in a new process: `seconds` is its run time, `compile` that of the compiler. Nothing is cached.
Times and MFU are predictions (`plan_accuracy.py` measures their accuracy).
Needs the extras `plan-gpu` and `plan-tpu`; a target whose compiler is not installed is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

from jaxtrain.planning import advice
from jaxtrain.planning.hardware import targets

ROOT = Path(__file__).resolve().parent.parent
STEP = ("step.remat=full", "precision=bf16")
SHORT = (*STEP, "data.sequence=4096", "data.global_batch=1024")
CARRIED = "70B, 256 chips, LIBTPU_INIT_ARGS as advised"  # planned with `jaxtrain.planning.advice.ASYNC_COLLECTIVES`
EXAMPLES = {  # name -> target, config and keys
    "70B, 256 chips": ("v5p:8x8x4", "recipes/llama3_70b.yaml"),
    CARRIED: ("v5p:8x8x4", "recipes/llama3_70b.yaml"),
    "405B, 512 GPUs": ("h100:64x8", "recipes/llama3_405b.yaml"),
    "405B, 512 GPUs, 16 microbatches of 2": ("h100:64x8", "recipes/llama3_405b.yaml", "step.microbatches=16"),
    "405B, 512 GPUs, ZeRO 1 for FSDP": (
        "h100:64x8", "recipes/llama3_405b.yaml", "layout=pp", "mesh={pipeline: 8, data: 8, fsdp: 1, model: 8}",
        "zero=1", "rules.sequence=model", "pipeline.schedule=interleaved_1f1b",
    ),
    "8B, 512 chips": ("v5p:8x8x8", "models/llama3_8b.yaml", *SHORT, "layout=fsdp", "mesh.fsdp=512"),
    "70B, 512 chips": ("v5p:8x8x8", "models/llama3_70b.yaml", *SHORT, "layout=fsdp", "mesh.fsdp=512"),
    "70B, 6144 chips": (
        "v5p:16x16x24", "models/llama3_70b.yaml", *SHORT, "data.global_batch=6144", "layout=hsdp", "mesh.data=24",
        "mesh.fsdp=256",
    ),
    "70B, 24576 chips in 4 slices": (
        "v5p:16x16x24*4", "models/llama3_70b.yaml", *SHORT, "data.global_batch=24576", "layout=hsdp", "mesh.data=96",
        "mesh.fsdp=256", "mesh.dcn={data: 4}",
    ),
    "8B, 512 GPUs": ("h100:64x8", "models/llama3_8b.yaml", *SHORT, "layout=fsdp", "mesh.fsdp=512"),
    "405B, 16384 GPUs": (
        "h100:2048x8", "recipes/llama3_405b.yaml", "data.global_batch=2048", "step.microbatches=16",
        "mesh={pipeline: 16, fsdp: 128, model: 8}",
    ),
    "405B, 131072 GPUs": (
        "h100:16384x8", "recipes/llama3_405b.yaml", "data.global_batch=16384", "step.microbatches=16",
        "rules.batch=[data,fsdp]", "mesh={pipeline: 16, data: 8, fsdp: 128, model: 8}",
    ),
}  # fmt: skip


def planned(name: str, target: str, config: str, *keys: str) -> dict[str, Any]:
    """A row, from one run of the command."""
    env = os.environ | ({"LIBTPU_INIT_ARGS": advice.ASYNC_COLLECTIVES} if name == CARRIED else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "jaxtrain.cli.main", "plan", str(ROOT / "configs" / config), *keys]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, "--target", target, "--json", str(file)], capture_output=True, text=True, cwd=folder, env=env
        )
        seconds = time.perf_counter() - start
        if done.returncode == 2 or not file.exists():
            return {"name": name, "target": target, "error": (done.stdout + done.stderr).strip().splitlines()[-1]}
        plan = json.loads(file.read_text())
    seconds_of_step = plan["step_seconds"]  # None where it does not fit
    rate = plan["tokens"] / seconds_of_step / plan["devices"] if seconds_of_step else None
    return {
        "name": name, "target": target, "layout": plan["layout"],
        "seconds": seconds, "compile": plan["compile_seconds"],
        "fits": plan["fits"], "GB": plan["needs"] / 1e9,
        "step s": seconds_of_step, "tokens/s/device": rate, "MFU": plan["mfu"],
        "waits s": plan["exposed_seconds"], "bubble s": plan["bubble_seconds"], "limit": plan["limit"],
    }  # fmt: skip


def main() -> int:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", help="a part of the names or targets")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (target, *given) in EXAMPLES.items():
        if args.only not in f"{name} {target}":
            continue
        if problem := targets.missing_packages(targets.parse(target)):
            print(f"{name}: left out: {problem}")
            continue
        rows.append(planned(name, target, *given))
        print(common.table(rows[-1:]), file=sys.stderr, flush=True)
        if args.quick:
            break
    print(common.table([row for row in rows if "error" not in row]))
    common.report("plan_examples", args, rows, common.machine("libtpu", "jax-cuda13-plugin"))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "benchmarks"))
    raise SystemExit(main())
