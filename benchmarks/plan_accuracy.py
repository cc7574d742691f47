"""Accuracy of `jaxtrain plan`: step time, memory, the order of layouts, and public runs.

    python benchmarks/plan_accuracy.py [--parts simulated gpu published] [--rounds 7] [--only h100]
                                       [--measured FILE] [--out FILE]

simulated: one small decoder in 26 layouts on 8 simulated CPU devices of this host. The predicted programs are run
interleaved, one step each, in one process. `wall` and `processor` are medians of these rounds, processor time over the
cores: other programs on the machine lengthen only the first. The rates of the host are measured three times in the same
process (jaxtrain.planning.hardware.simulated), and the best counts. tau is Kendall's of predicted against measured
seconds, `tau of halves` that of the first half of the steps against the second, the noise of the measurement. Regret is
how much slower than the fastest layout the layout predicted to be the fastest is. Memory: bytes of the live train state
per device, exact, and the growth of a separate process during its second step against the temporaries of all devices,
which shows neither the memory of one device nor holes that are never touched.

gpu: the same for one GPU, every point in a separate process, so that `memory_stats()` has its peak. Predictions are of
the program compiled for that GPU. `--measured FILE`, the record of such a run, predicts the same cases on a machine
without a GPU.

published: public runs on their own hardware (published.py), compiled for it; needs `plan-gpu` and `plan-tpu`. `known`
is `fitted` if constants of its chip were fitted to the run, else `test`; all runs of H100 were known before.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import common
import published

from jaxtrain.core.resolve import resolve
from jaxtrain.planning import compile, predict
from jaxtrain.planning.assess import assess
from jaxtrain.planning.hardware import chips, targets

ROOT = Path(__file__).resolve().parent.parent
VOCAB = {"simulated": 2048, "gpu": 32000}
SMALL = (
    "model.embed=256", "model.layers=4", "model.heads=8", "model.kv_heads=8", "model.mlp=1024",
    "data.sequence=64", "data.global_batch=16", "data.validation_fraction=0", "precision=fp32",
)  # fmt: skip
CASES = (
    "ddp data=8", "ddp data=8 step.remat=full", "ddp data=8 step.microbatches=2",
    "fsdp fsdp=8", "fsdp fsdp=8 step.remat=full", "fsdp fsdp=8 step.microbatches=2", "fsdp fsdp=4 data=2",
    "tp model=8", "tp model=4 data=2", "tp model=2 data=4",
    "tp_sp model=2 fsdp=4", "tp_sp model=4 fsdp=2 step.remat=full",
    "fsdp_tp fsdp=4 model=2", "fsdp_tp fsdp=2 model=4 step.microbatches=2",
    "zero1 data=8", "zero2 data=8 step.microbatches=2", "zero3 data=8",
    "cp_gather fsdp=4 context=2", "cp_gather context=8", "cp_ring context=4 fsdp=2",
    "cp_ulysses context=4 fsdp=2", "cp_ulysses context=8",
    "pp pipeline=2 data=4 step.microbatches=4", "pp pipeline=4 data=2 step.microbatches=4",
    "pp_fsdp pipeline=2 fsdp=4 step.microbatches=2", "3d data=2 fsdp=2 model=2",
)  # fmt: skip
RESIDENT = (0, 1, 2, 3, 10, 18)  # of these, whose memory is measured in a process of its own
LARGER = ("data.sequence=256", "data.global_batch=64")
AXES = ("data", "fsdp", "model", "context", "pipeline")
REMAT = ("none", "full", "dots", "[attention,q,k,v,gate,up,residual]")
GPU_MODELS = {"0.4b": "llama_400m.yaml", "1.3b": "llama_1b.yaml"}
GPU_CASES = tuple(
    f"{model} ddp data=1 data.global_batch={rows} step.remat={remat} step.microbatches={accumulate} {more}".strip()
    for model, rows, accumulate, more in (
        ("0.4b", 2, 1, ""), ("0.4b", 8, 1, ""), ("0.4b", 8, 2, ""),
        ("1.3b", 4, 1, ""), ("1.3b", 4, 1, "step.unroll=0"),
    ) for remat in REMAT
)  # fmt: skip


def configured(case: str, model: str, more: Sequence[str] = ()) -> Any:
    """Config of `LAYOUT axis=size ... key=value ...`."""
    layout, *rest = case.split()
    sizes = dict.fromkeys(AXES, "1") | dict(one.split("=") for one in rest if one.split("=")[0] in AXES)
    keys = [one for one in rest if one.split("=")[0] not in AXES]
    mesh = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    return resolve(str(ROOT / "configs" / "models" / model), *more, f"layout={layout}", *mesh, *keys, paths=False)[0]


class Running:
    """A program, its prediction, and its steps."""

    def __init__(self, case: str, config: Any, vocab: int, target: str):
        import jax

        from jaxtrain.core.program import build_program
        from jaxtrain.planning import step_program

        devices = jax.devices()
        self.case, self.config, self.devices = case, config, devices
        self.program = build_program(config, vocab, devices)
        begin = time.perf_counter()
        self.step = step_program.compile_step(self.program)
        took = time.perf_counter() - begin
        self.report = compile.report_program(self.program, self.step, target, devices[0].device_kind, seconds=took)
        host = common.packed_batch(0, config.data.global_batch, config.data.sequence, vocab, 2)
        wanted = step_program.abstract_batch(self.program)
        self.batch = {name: jax.device_put(rows, wanted[name].sharding) for name, rows in host.items()}
        self.state = self.program.init()
        jax.block_until_ready(self.state)
        self.wall: list[float] = []
        self.processor: list[float] = []

    def once(self) -> None:
        """One step, timed."""
        import jax

        wall, processor = time.perf_counter(), time.process_time()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)

    def held(self) -> int:
        """Bytes of the live train state on the first device."""
        import jax

        shards = (shard for leaf in jax.tree.leaves(self.state) for shard in leaf.addressable_shards)
        return sum(shard.data.nbytes for shard in shards if shard.device == self.devices[0])


def simulated(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of the host, and every case predicted and measured, in this process."""
    import jax

    from jaxtrain.planning import step_program

    runs, rates = [], []
    for case in spec["cases"]:
        config = configured(case, "llama_tiny.yaml", SMALL)
        runs.append(Running(case, config, VOCAB["simulated"], f"simulate:{jax.device_count()}"))
    for turn in range(spec["rounds"] + 1):
        if turn in (0, spec["rounds"] // 2, spec["rounds"]):
            rates.append(step_program.cpu_rates(jax.devices(), "fp32") or {})
        for run in runs:
            run.once()
    best = {key: (min if key in ("launch", "barrier") else max)(one[key] for one in rates) for key in rates[0]}
    return {"machine": common.machine(), "rates": best, "rows": [_simulated_row(run, best) for run in runs]}


def _simulated_row(run: Running, rates: dict[str, float]) -> dict[str, Any]:
    run.report = replace(run.report, cpu_rates=rates)
    plan, cores = assess(run.config, run.report), len(os.sched_getaffinity(0))
    timed = {"wall s": run.wall[1:], "processor s": [time / cores for time in run.processor[1:]]}  # the first warms up
    half = (len(run.wall) - 1) // 2
    return {
        "case": run.case, "predicted s": plan.step_seconds,
        **{key: statistics.median(times) for key, times in timed.items()},
        "computing s": plan.compute_seconds, "waiting s": plan.exposed_seconds, "bubble s": plan.bubble_seconds,
        "state MB": sum(run.report.state_bytes.values()) / 1e6, "live MB": run.held() / 1e6,
        "temporaries MB": run.report.memory.temporaries / 1e6,
        "halves": {
            key: [statistics.median(part) for part in (times[:half], times[half:])] for key, times in timed.items()
        },
    }  # fmt: skip


def resident(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Growth of this process during its second step, against the temporaries of all its devices."""
    import jax

    config = configured(spec["case"], "llama_tiny.yaml", (*SMALL, *spec["more"]))
    run = Running(spec["case"], config, VOCAB["simulated"], f"simulate:{jax.device_count()}")
    run.once()  # threads, code and buffers of the runtime stay
    if not common.reset_peak_rss():
        return {"error": "this system cannot reset a process's peak"}
    ctypes.CDLL(None).malloc_trim(0)
    common.reset_peak_rss()
    before = common.peak_rss()
    run.once()
    planned = run.report.memory
    more = planned.temporaries + planned.outputs - planned.aliased
    grown = (common.peak_rss() - before) / 1e6
    return {"case": spec["case"], "planned MB": more * jax.device_count() / 1e6, "grown MB": grown}


def gpu_config(case: str) -> Any:
    """Config of `MODEL LAYOUT axis=size ... key=value ...`."""
    model, rest = case.split(" ", 1)
    return configured(rest, GPU_MODELS[model], ("data.sequence=2048", "data.validation_fraction=0", "precision=bf16"))


def on_gpu(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A point on the GPUs of this machine."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        return {"skipped": f"plan_accuracy: the part gpu needs a GPU, and JAX has {device.device_kind} here"}
    config = gpu_config(spec["case"])
    with open(spec["lock"], "w") as lock:  # others get ready meanwhile, but nothing else runs on the GPU
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = Running(spec["case"], config, VOCAB["gpu"], "local")
        for _ in range(spec["rounds"] + 2):
            run.once()
    plan, measured = assess(config, run.report), statistics.median(run.wall[2:])
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "machine": common.machine(), "case": spec["case"], "predicted s": plan.step_seconds, "wall s": measured,
        "predicted GB": plan.needs / 1e9, "peak GB": peak / 1e9, "memory ratio": plan.needs / peak if peak else None,
    }  # fmt: skip


def prediction(run: published.Run) -> dict[str, Any]:
    """A public run and its prediction; rates are tokens/s a device."""
    row: dict[str, Any] = {"run": run.name, "target": run.target, "known": run.known, "published": run.rate}
    if problem := targets.missing_packages(targets.parse(run.target)):
        return row | {"skipped": problem}
    first, *keys = run.keys
    config, _ = resolve(str(ROOT / first), *keys, paths=False)
    with mock.patch.dict(os.environ, {"LIBTPU_INIT_ARGS": run.flags} if run.flags else {}):
        plan = predict.predict(config, run.vocab, run.target)
    if not plan.tokens_per_second or not plan.flops_model or not plan.mfu:
        return row | {"skipped": plan.reason}
    rate = plan.tokens_per_second / plan.devices
    return row | {
        "predicted": rate, "ratio": rate / run.rate, "published MFU %": 100 * plan.mfu * run.rate / rate,
        "predicted MFU %": 100 * plan.mfu, "needs GB": plan.needs / 1e9, "fits": str(plan.fits),
        "compile s": plan.compile_seconds, "source": run.source, "apart": run.apart, "flags": run.flags,
    }  # fmt: skip


def tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau-a: (concordant pairs - discordant ones) / all pairs. Kendall 1938."""
    pairs = [(i, j) for i in range(len(predicted)) for j in range(i)]
    signs = ((predicted[i] - predicted[j]) * (measured[i] - measured[j]) for i, j in pairs)
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower than the fastest the predicted fastest is, as a share."""
    return measured[min(range(len(predicted)), key=predicted.__getitem__)] / min(measured) - 1


def agreement(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """Agreement of `predicted s` with a column."""
    predicted, measured = [row["predicted s"] for row in rows], [row[key] for row in rows]
    ratios = [a / b for a, b in zip(predicted, measured)]
    return {
        "tau": tau(predicted, measured), "regret": regret(predicted, measured),
        "median ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
        "within 15%": sum(abs(ratio - 1) <= 0.15 for ratio in ratios) / len(ratios),
    }  # fmt: skip


def part_simulated(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the tables of simulated devices."""
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    cases = CASES[:2] if args.quick else CASES
    result = common.in_child(__file__, {"what": "simulated", "cases": cases, "rounds": args.rounds}, env, timeout=3000)
    if "error" in result:
        return result
    rows = result["rows"]
    print(common.table([{key: value for key, value in row.items() if key != "halves"} for row in rows]))
    print("rates of one of the devices:", {key: f"{value:.3g}" for key, value in result["rates"].items()})
    result["agreement"] = {
        key: agreement(rows, key) | {"tau of halves": tau(*zip(*(row["halves"][key] for row in rows)))}
        for key in ("wall s", "processor s")
    }
    print(common.table([{"against": key, **values} for key, values in result["agreement"].items()]))
    result["resident"] = [
        common.in_child(
            __file__,
            {"what": "resident", "case": CASES[index], "more": LARGER},
            env,
        )
        for index in (RESIDENT[:0] if args.quick else RESIDENT)
    ]
    print(common.table([row for row in result["resident"] if "error" not in row]))
    return result


def part_gpu(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the table of a GPU, or that there is none."""
    if args.measured:
        return absent_gpu(json.loads(args.measured.read_text())["results"]["gpu"])
    rows = []
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(3) as pool:

        def one(case: str) -> dict[str, Any]:
            spec = {"what": "gpu", "case": case, "rounds": args.rounds, "lock": lock.name}
            return common.in_child(__file__, spec, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})

        first, *others = GPU_CASES[:2] if args.quick else GPU_CASES
        rows.append(one(first))
        if "skipped" in rows[0]:
            print(rows[0]["skipped"])
            return rows[0]
        for row in pool.map(one, others):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return gpu_result(rows)


def gpu_result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints the table of a GPU."""
    done = [row for row in rows if "error" not in row]
    if not done:
        return {"error": rows[0]["error"]}
    print(common.table([{key: value for key, value in row.items() if key != "machine"} for row in done]))
    result = {"machine": done[0]["machine"], "rows": rows, "agreement": {"wall s": agreement(done, "wall s")}}
    print(common.table([result["agreement"]["wall s"]]))
    return result


def absent_gpu(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Predictions, made without a GPU, of cases that were measured on one."""
    kind = measured["machine"]["devices"].split(" x ", 1)[1]
    target = next(name for name, chip in chips.CHIPS.items() if chip is chips.chip_of_device(kind))
    rows = []
    for row in measured["rows"]:
        if "error" not in row:
            plan = predict.predict(gpu_config(row["case"]), VOCAB["gpu"], f"{target}:1x1")
            told = {"predicted s": plan.step_seconds, "predicted GB": (plan.needs or 0) / 1e9}
            rows.append(row | told | {"memory ratio": told["predicted GB"] / row["peak GB"]})
            print(rows[-1], file=sys.stderr, flush=True)
    return gpu_result(rows)


def part_published(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the table of public runs."""
    runs = [run for run in (*published.GPUS, *published.TPUS) if run.target.startswith(args.only)]
    rows = []
    for run in runs[:1] if args.quick else runs:
        rows.append(prediction(run))
        print(rows[-1], file=sys.stderr, flush=True)
    done = [row for row in rows if "ratio" in row]
    hidden = ("source", "apart", "flags", "compile s", "fits")
    print(common.table([{key: value for key, value in row.items() if key not in hidden} for row in done]))
    for problem in dict.fromkeys(f"{row['run']}: {row['skipped']}" for row in rows if "skipped" in row):
        print(problem)
    return {"rows": rows}


PARTS = {"simulated": part_simulated, "gpu": part_gpu, "published": part_published}


def main() -> None:
    """Prints the tables and, with --out, writes the JSON; parts that are not run keep their results in the file."""
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each case")
    parser.add_argument("--only", default="", help="public runs on targets whose name begins so")
    parser.add_argument("--measured", type=Path, help="record of the part gpu, from a machine that has one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        spec = json.loads(args.child)
        print(json.dumps({"simulated": simulated, "resident": resident, "gpu": on_gpu}[spec["what"]](spec)))
        return
    if args.quick:
        args.rounds = 2
    results = {name: PARTS[name](args) for name in args.parts}
    known = json.loads(args.out.read_text())["results"] if args.out and args.out.exists() else {}
    where = next((part["machine"] for part in results.values() if "machine" in part), common.machine())
    print(common.title(where))
    common.report("plan_accuracy", args, known | results, where)


if __name__ == "__main__":
    main()
