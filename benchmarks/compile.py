"""Time to the first step: by depth, and by simulated devices; trace, lower and compile separately.

    python benchmarks/compile.py [--depths 2 8 32] [--devices 1 8 64] [--out compile.json]

Every point is a new process; on one device a second process uses the compilation cache (which several CPU devices do
not have). `imports` is Python's; `build` the abstract model, shardings, jit objects and devices; `init` the parameters;
`trace`, `lower` and `compile` are those of the train step; `step` is its first execution. `first step` is the time from
the start of the process; `cached` the same with the cache, `cached compile` its compilation. Layers are scanned, so
nothing should grow with depth; devices share the cores here, so `step` grows with them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

SHAPE = {"embed": 128, "heads": 4, "kv_heads": 4, "mlp": 384}
LAYOUTS = {1: "ddp", 8: "3d", 64: "3d"}
MESHES = {
    1: {},
    8: {"data": 2, "fsdp": 2, "model": 2},
    64: {"data": 4, "fsdp": 4, "model": 4},
}


def started() -> float:
    """Start time of this process in seconds since the epoch, if the system reports it; else now."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Times the phases of one start, in seconds, and tells whether the train step came from the compilation cache."""
    begin, phases = started(), {}
    mark = begin

    def done(name: str) -> None:
        nonlocal mark
        now = time.time()
        phases[name], mark = now - mark, now

    import jax

    import jaxtrain
    from jaxtrain.core.program import build_program
    from jaxtrain.distributed import runtime

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    done("imports")
    base = {
        "precision": "fp32", "simulate": spec["devices"],
        "layout": LAYOUTS[spec["devices"]], "mesh": MESHES[spec["devices"]],
        "model": SHAPE | {"layers": spec["layers"], "vocab": 1024},
        "data": {"sequence": spec["length"], "global_batch": spec["rows"]},
    }  # fmt: skip
    config = jaxtrain.load(None, base=base)
    program = build_program(config, 1024, runtime.start(config.simulate))
    done("build")
    state = jax.block_until_ready(program.init())
    done("init")
    batch = common.packed_batch(0, spec["rows"], spec["length"], 1024, 4)
    traced = program.step.trace(state, batch)
    done("trace")
    lowered = traced.lower()
    done("lower")
    events.clear()
    compiled = lowered.compile()
    from_cache = "/jax/compilation_cache/cache_hits" in events
    done("compile")
    jax.block_until_ready(compiled(state, batch))
    done("step")
    return {"phases": phases, "first_step": mark - begin, "from_cache": from_cache, "machine": common.machine()}


def point(layers: int, devices: int, quick: bool) -> dict[str, Any]:
    """One start; on one device a second one, with the cache of the first."""
    spec = {"layers": layers, "devices": devices, "rows": 64 if devices > 8 else 8, "length": 32 if quick else 128}
    with tempfile.TemporaryDirectory() as cache:
        env = {"JAX_COMPILATION_CACHE_DIR": cache}
        runs = [common.in_child(__file__, spec, env) for _ in range(2 if devices == 1 else 1)]
    error = next((run["error"] for run in runs if "error" in run), None)
    if error:
        return {"point": spec, "error": error}
    return {"point": spec, "machine": runs[0].pop("machine")} | dict(zip(("empty", "full"), runs))


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """A row of the table, seconds."""
    row: dict[str, Any] = {"layers": result["point"]["layers"], "devices": result["point"]["devices"]}
    if "error" in result:
        return row | {"error": result["error"]}
    row |= {"first step": result["empty"]["first_step"], **result["empty"]["phases"]}
    if full := result.get("full"):
        row |= {"cached": full["first_step"], "cached compile": full["phases"]["compile"]}
    return row


def main() -> None:
    """Prints the table and, with --out, writes the JSON."""
    parser = common.parser(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 8, 32], help="layers, on one device")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 8, 64], choices=MESHES, help="simulated, of 8 layers"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(json.loads(args.child))))
        return
    if args.quick:
        args.depths, args.devices = [2], []
    points = [(layers, 1) for layers in args.depths] + [(8, count) for count in args.devices]
    results = []
    for layers, devices in dict.fromkeys(points):
        results.append(point(layers, devices, args.quick))
        print(shown(results[-1]), file=sys.stderr)
    where = next((r["machine"] for r in results if "machine" in r), common.machine())
    print(common.title(where))
    print(common.table([shown(result) for result in results]))
    common.report("compile", args, results, where)
    if all("error" in result for result in results):
        raise SystemExit("nothing was measured: " + results[0]["error"])


if __name__ == "__main__":
    main()
