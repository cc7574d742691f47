"""Pipeline schedules: time, bubble, memory and FLOPs of real train steps, compared with GPipe by autodiff (gpipe.py).

    python benchmarks/pipeline.py [--parts waiting cores flops memory] [--targets cpu:4 h100:1x4 v5e:2x2] [--out p.json]

`waiting`: step time for 2, 4 and 8 stages of a model whose layers sleep (waiting.py), so that all stages are busy at
once on any machine. F, B and W of a layer take equally long. `bubble` is 1 - work / (stages * step), where work is the
step of 2 microbatches without a pipeline, times m / 2, in the same run; `table` is the bubble of the schedule's table
in lockstep (pipeline.schedules.cost), `bound` that of asynchronous stages; `peak` the activations of a stage, in
microbatches.
`cores`: a small decoder in two stages, each a process pinned to a core; `cpu` is the processor time of both over that
of the step without a pipeline: 1 without overhead (busy waiting counts).
`flops`: matmuls of the compiled step, each action as often as in the table, over those of the step without a pipeline;
GPipe by autodiff also has those of its bubble, (m + p - 1) / m. Its gradients are checked first.
`memory`: of the compiled step, for targets whose compilers are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import common

NAMES = ("gpipe", "1f1b", "1f1b_aligned", "interleaved_1f1b", "zb_h1", "zb_v", "v_half")
AUTODIFF, REMAT = "autodiff", "autodiff remat"  # GPipe by autodiff; with each stage recomputed
PARTS = ("waiting", "cores", "flops", "memory")
SMALL = (
    "data.sequence=128", "model.embed=256", "model.heads=4", "model.kv_heads=4", "model.mlp=768", "model.vocab=512",
)  # fmt: skip
QUICK = ("data.sequence=32", "model.embed=32", "model.heads=2", "model.kv_heads=2", "model.mlp=64", "model.vocab=64")
LARGE = (
    "data.sequence=1024", "model.embed=1024", "model.heads=8", "model.kv_heads=8", "model.mlp=3072",
    "model.vocab=8192", "loss.vocab_chunks=8",
)  # fmt: skip


def table_of(name: str, stages: int, microbatches: int) -> Any:
    """Returns the schedule's table; for GPipe by autodiff that of gpipe."""
    from jaxtrain.pipeline.schedules.shipped import shipped_table

    return shipped_table("gpipe" if name.startswith(AUTODIFF) else name, stages, microbatches)


def decoder(name: str, stages: int, microbatches: int, sizes: Any, layers: int = 8, rows: int = 2) -> Any:
    """Returns the config of a decoder under a schedule, or without a pipeline if there is one stage."""
    from jaxtrain.core.resolve import resolve

    schedule = "gpipe" if name.startswith(AUTODIFF) else name
    layout = ("layout=ddp", "mesh.data=1") if stages == 1 else (
        "layout=pp", f"mesh.pipeline={stages}", "mesh.data=1", f"pipeline.schedule={schedule}",
    )  # fmt: skip
    counts = (f"model.layers={layers}", f"step.microbatches={microbatches}", f"data.global_batch={rows * microbatches}")
    fixed = ("data.validation_fraction=0", "step.attention=xla", "precision=fp32")
    return resolve(None, *layout, *fixed, *counts, *sizes, paths=False)[0]


def build(name: str, config: Any, devices: Any) -> Any:
    """Returns the trainer's program, or the one by autodiff."""
    from jaxtrain.core.program import build_program

    if name.startswith(AUTODIFF):
        import gpipe

        return gpipe.program(config, config.model.vocab, devices, remat=name == REMAT)
    return build_program(config, config.model.vocab, devices)


def placed(program: Any, batch: Any) -> Any:
    """Puts a host batch on the program's devices, including those of other processes."""
    import jax

    from jaxtrain.core.placement import batch_sharding

    def put(x: Any) -> Any:
        return jax.make_array_from_callback(x.shape, batch_sharding(program.sharder, x.ndim, False), lambda at: x[at])

    return {name: put(x) for name, x in batch.items()}


def timed(programs: dict[str, Any], batches: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the minimum wall and processor seconds of a step of each program; other load can only add to them.

    The steps of the programs are interleaved.
    """
    import jax

    states = {name: program.init() for name, program in programs.items()}
    batches = {name: placed(program, batches[name]) for name, program in programs.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for index in range(rounds + 1):
        for name, program in programs.items():
            start = time.perf_counter(), time.process_time()
            states[name], metrics = program.step(states[name], batches[name])
            jax.block_until_ready((states[name], metrics))
            if index:  # the first one compiles
                seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return {
        name: {"wall": min(wall for wall, _ in times), "cpu": min(cpu for _, cpu in times)}
        for name, times in seconds.items()
    }


def in_table(name: str, stages: int, microbatches: int, seconds: float, work: float) -> dict[str, Any]:
    """Returns a row: the measured step and the figures of the table. `work`: seconds of the step without a pipeline."""
    from jaxtrain.pipeline.schedules.cost import Costs, schedule_cost

    table = table_of(name, stages, microbatches)
    cost, remat_cost = schedule_cost(table), schedule_cost(table, Costs(1, 2, 1))
    lockstep = remat_cost.lockstep if name == REMAT else cost.lockstep
    return {
        "schedule": name, "stages": stages, "microbatches": microbatches, "step ms": 1e3 * seconds,
        "bubble": 1 - work / (stages * seconds), "table": 1 - cost.work / lockstep, "bound": cost.bubble,
        "peak": float(cost.peak.max()),
    }  # fmt: skip


def waiting(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of one number of stages and of microbatches."""
    import jax
    import waiting as model

    from jaxtrain.config.schema import Config

    stages, many, layers, size = spec["stages"], spec["microbatches"], 2 * spec["stages"], 8
    few = 2  # microbatches without a pipeline: a long step would always share the machine with other load

    def config(name: str) -> Any:
        mesh, rules = ({"data": 1}, {}) if name == "none" else ({"pipeline": stages}, {"layers": "pipeline"})
        many = few if name == "none" else spec["microbatches"]
        schedule = "gpipe" if name.startswith((AUTODIFF, "none")) else name
        options = {"size": size, "layers": layers, "seconds": [spec["seconds"]] * 3}
        return Config(
            precision="fp32", mesh=mesh, rules={"batch": "data", **rules}, steps=10,
            data={"global_batch": many, "sequence": 1}, model={"type": "waiting:Waiting", "options": options},
            step={"microbatches": many}, pipeline={"schedule": schedule}, optimizer={"name": "sgd"},
        )  # fmt: skip

    programs = {n: build(n, config(n), jax.devices()[: 1 if n == "none" else stages]) for n in ("none", *spec["names"])}
    batches = {name: model.batch(few if name == "none" else many, size) for name in programs}
    seconds = timed(programs, batches, spec["rounds"])
    work = seconds.pop("none")["wall"] * many / few
    return [in_table(name, stages, many, times["wall"], work) for name, times in seconds.items()]


def cores(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of two stages, each a process pinned to a core. This is one of them."""
    core = sorted(os.sched_getaffinity(0))[spec["rank"]]
    os.sched_setaffinity(0, {core})
    os.environ["NPROC"] = "1"  # threads of XLA's pool
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(spec["address"], 2, spec["rank"])
    many = spec["microbatches"]
    programs = {
        name: build(name, decoder(name, *at, SMALL), devices)
        for name, at, devices in [
            ("none", (1, many), jax.local_devices()), *((n, (2, many), jax.devices()) for n in spec["names"])
        ]
    }  # fmt: skip
    batch = common.packed_batch(0, 2 * many, 128, 512, 4)
    seconds = timed(programs, dict.fromkeys(programs, batch), spec["rounds"])
    none = seconds.pop("none")
    return [
        in_table(name, 2, many, times["wall"], none["wall"]) | {"cpu": 2 * times["cpu"] / none["cpu"]}
        for name, times in seconds.items()
    ]


def flops(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of one number of stages: matmul FLOPs over those without a pipeline, for each remat policy."""
    import jax

    from jaxtrain.planning.cost.pipeline_bubble import branch_weights
    from jaxtrain.planning.cost.roofline import analyze
    from jaxtrain.planning.step_program import compile_step

    stages, many, out = spec["stages"], spec["microbatches"], []
    for remat in spec["remat"]:
        sizes = (*(QUICK if spec["quick"] else SMALL), f"step.remat={remat}")
        plain = build("none", decoder("none", 1, many, sizes), jax.devices()[:1])
        base = analyze(compile_step(plain).as_text()).flops()
        for name in spec["names"]:
            program = build(name, decoder(name, stages, many, sizes), jax.devices()[:stages])
            if name.startswith(AUTODIFF):
                check(plain, program)
            weights = partial(lambda table, one, _: branch_weights(table, one), table_of(name, stages, many))
            ratio = stages * analyze(compile_step(program).as_text(), branch_weights=weights).flops() / base
            bubble = (many + stages - 1) / many if name.startswith(AUTODIFF) else 1.0
            out.append({
                "schedule": name, "stages": stages, "microbatches": many, "remat": remat, "GFLOP": base / 1e9,
                "ratio": ratio, "beyond the bubble": ratio / bubble - 1,
            })  # fmt: skip
    return out


def check(plain: Any, program: Any) -> None:
    """Checks that loss and gradients by autodiff are those without a pipeline."""
    import jax
    import numpy as np

    data, vocab = plain.config.data, plain.config.model.vocab
    batch, key = common.packed_batch(0, data.global_batch, data.sequence, vocab, 4), jax.random.key(0)
    expected, actual = (jax.jit(p.gradients)(p.init()["params"], placed(p, batch), key) for p in (plain, program))
    pairs = zip(jax.tree.leaves((expected.sums, expected.grads)), jax.tree.leaves((actual.sums, actual.grads)))
    worst = max(float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(a)) for a, b in pairs)
    if not worst < 1e-5:
        raise SystemExit(f"GPipe by autodiff computes another model: gradients differ by {worst:.1e}")


def memory(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the bytes of one compiled step, in a process with the environment of the target."""
    from jaxtrain.planning.cost.memory import compiled_memory
    from jaxtrain.planning.hardware import targets
    from jaxtrain.planning.step_program import compile_step

    dtype = "fp32" if spec["target"].startswith("cpu") else "bf16"
    sizes = (*(QUICK if spec["quick"] else LARGE), f"step.remat={spec['remat']}", f"precision={dtype}")
    config = decoder(spec["schedule"], spec["stages"], spec["microbatches"], sizes, layers=2 * spec["stages"])
    devices = targets.devices(spec["target"], attention="xla")
    usage = compiled_memory(compile_step(build(spec["schedule"], config, devices)))
    return {"arguments MB": usage.arguments / 1e6, "temporaries MB": usage.temporaries / 1e6}


def run_waiting(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Returns all rows of `waiting`."""
    points = [(p, factor * p) for p in args.stages for factor in ((2,) if args.quick else (1, 2, 4))]
    rows = []
    for stages, many in points:
        spec = {"part": "waiting", "stages": stages, "microbatches": many, "names": names}
        spec |= {"seconds": (1 if args.quick else args.wait) / 1e3, "rounds": 1 if args.quick else 5}
        rows += child(spec, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(stages)})
    return rows


def run_cores(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Returns all rows of `cores`: runs two processes and reports the figures of the first."""
    rows = []
    for many in args.cores:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        spec = {"part": "cores", "microbatches": many, "names": names, "address": address, "rounds": 5}
        env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        command = [sys.executable, __file__, "--child", json.dumps(spec | {"rank": 1})]
        other = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | env)
        try:
            rows += child(spec | {"rank": 0}, env)
        finally:
            other.kill()
            other.wait()
    return rows


def run_flops(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Returns all rows of `flops`."""
    rows = []
    for stages in args.stages:
        remat = ["none"] if args.quick else ["none", "full"]
        spec = {"part": "flops", "stages": stages, "microbatches": 2 * stages, "names": names, "remat": remat}
        if stages <= 4:  # of 8 layers
            env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(stages)}
            rows += child(spec | {"quick": args.quick}, env)
    return rows


def run_memory(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Returns all rows of `memory`: one per program, with a column for each number of microbatches."""
    from jaxtrain.planning.hardware import targets

    rows = []
    for text in args.targets:
        target = targets.parse(text)
        if problem := targets.missing_packages(target, "xla"):
            print(f"memory: skipped: {problem}")
            continue
        stages = target.shape[0] if target.platform == "cpu" else 4
        for name in names:
            row: dict[str, Any] = {"target": text, "schedule": name, "remat": args.remat}
            for many in args.microbatches:
                spec = {"part": "memory", "target": text, "stages": stages, "microbatches": many, "schedule": name}
                spec |= {"remat": args.remat, "quick": args.quick}
                result = common.in_child(__file__, spec, targets.environment(target))
                row |= {"arguments MB": result.get("arguments MB")} | {f"m={many}": result.get("temporaries MB")}
                row["error"] = row.get("error", "") or result.get("error", "")[:60]
            rows.append(row)
            print(common.table([row]), file=sys.stderr)
    return rows


def child(spec: dict[str, Any], env: dict[str, str]) -> list[dict[str, Any]]:
    """Returns rows from a fresh process; prints an error and returns none if it fails."""
    result = common.in_child(__file__, spec, env, timeout=1500)
    if "error" in result:
        print(f"{spec}: {result['error']}", file=sys.stderr)
        return []
    print(common.table(result["rows"]), file=sys.stderr)
    return result["rows"]


def options() -> argparse.Namespace:
    """Parses the command line; `--quick` selects a small run."""
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--schedules", nargs="+", choices=(*NAMES, AUTODIFF, REMAT), default=[*NAMES, AUTODIFF, REMAT])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], help="for waiting, and up to 4 for flops")
    parser.add_argument("--wait", type=float, default=8.0, help="milliseconds of a layer's F, B and W each")
    parser.add_argument("--cores", type=int, nargs="+", default=[4, 16], help="microbatches for cores")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 32, 128], help="for memory")
    parser.add_argument("--targets", nargs="+", default=["cpu:4", "h100:1x4", "v5e:2x2"], help="for memory")
    parser.add_argument("--remat", default="full", help="for memory")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.parts, args.stages, args.targets, args.microbatches = ["waiting", "flops", "memory"], [2], ["cpu:2"], [4]
        args.schedules = ["1f1b", "zb_h1", AUTODIFF]
    return args


def main() -> int:
    """Prints the tables."""
    args = options()
    if args.child:
        spec = json.loads(args.child)
        output = {"waiting": waiting, "cores": cores, "flops": flops, "memory": memory}[spec["part"]](spec)
        print(json.dumps(output if isinstance(output, dict) else {"rows": output}))
        return 0
    results: dict[str, Any] = {}
    for part in args.parts:
        run = {"waiting": run_waiting, "cores": run_cores, "flops": run_flops, "memory": run_memory}[part]
        names = args.schedules[:1] if args.quick and part == "memory" else args.schedules
        print(f"\n{part}\n{common.table(results.setdefault(part, run(args, names)))}", flush=True)
        common.report("pipeline", args, results, common.machine())
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    raise SystemExit(main())
